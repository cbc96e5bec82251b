"""The OpenAI-compatible HTTP server. Uses the engine through what `nvium_core` exports; imports no PyTorch."""
