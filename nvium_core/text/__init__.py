"""Between text and tokens: what the server and `LLM` share. Knows no HTTP and no engine."""
