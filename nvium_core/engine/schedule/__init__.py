"""Scheduling on the host: which rows run next, and on which pages. No PyTorch."""
