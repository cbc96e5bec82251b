"""Schedules and whole replicas simulated from measured costs, without a model. No PyTorch."""
