"""What a run reads: documents, their tokens, and the windows that are cut from them."""
