"""From a checked request to deltas of text."""
