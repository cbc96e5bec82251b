"""Aliases of request fields: the names that other servers use."""

ALIASES: dict[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_cmpl": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "no_stop_trim": "include_stop_str_in_output",
    "return_full_text": "echo",
}
"""Maps an alias to its field. An endpoint accepts the alias if it has the field, and no field named like the alias."""
