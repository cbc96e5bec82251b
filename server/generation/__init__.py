"""Turns a checked request into text deltas."""
