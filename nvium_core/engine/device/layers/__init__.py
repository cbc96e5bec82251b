"""Runs Steps with PyTorch operators."""
