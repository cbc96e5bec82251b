"""Turns deltas into OpenAI's response bodies, whole or streamed."""
