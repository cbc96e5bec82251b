"""The OpenAI-compatible HTTP server. Knows the engine by what `nvium_core` exports, and no PyTorch."""
