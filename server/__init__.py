"""The OpenAI-compatible HTTP server. It uses the engine through `nvium_core`'s public names and imports no PyTorch."""
