"""Generates text for a validated request, as a stream of deltas."""
