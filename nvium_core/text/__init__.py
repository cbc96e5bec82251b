"""Text processing shared by the server and `LLM`: tokenizers, chat templates, detokenization, tool calls, reasoning."""
