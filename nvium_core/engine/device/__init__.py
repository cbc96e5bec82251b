"""Runs Steps: all code that touches tensors."""
