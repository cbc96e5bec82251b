"""Schedules and replicas simulated from measured costs, without a model or PyTorch."""
