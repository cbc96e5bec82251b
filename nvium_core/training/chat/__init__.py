"""Conversations as training data: reading, tokenizing and packing them."""
