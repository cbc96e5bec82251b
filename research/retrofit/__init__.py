"""Models that got exits afterwards."""
