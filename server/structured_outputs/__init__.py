"""Compiles the formats of structured outputs to grammars, and computes the masks of the tokens that may come next."""
