"""Runs Steps of few rows on a GPU as CUDA graphs. Without CUDA, as in tests, the same functions run uncaptured."""
