"""Tokens that a server knows, for prompts of a stated length: what its `/tokenize` makes of some text."""

import httpx

from loadtest.prompts import DEFAULT_PROMPTS


class VocabularyError(Exception):
    """The server does not tell its tokens; the message is one line for the user."""


async def token_ids(http: httpx.AsyncClient, model: str) -> list[int]:
    """Ordinary tokens, in order. Raises `VocabularyError`."""
    text = " ".join(str(prompt.content) for prompt in DEFAULT_PROMPTS)
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        response = (await http.post("/tokenize", json=body)).raise_for_status()
        return sorted({int(token_id) for token_id in response.json()["tokens"]})
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise VocabularyError(f"prompts of so many tokens need the server's /tokenize: {error!r}") from error
