"""Runs Steps of few rows on a GPU as CUDA graphs. Without CUDA the captured functions are called, for tests."""
