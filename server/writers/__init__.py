"""From deltas to OpenAI's bodies, whole or streamed."""
