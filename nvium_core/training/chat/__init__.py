"""Conversations as training data: from stories to packed windows of tokens."""
