"""Training data: documents, their tokens, and batches of windows."""
