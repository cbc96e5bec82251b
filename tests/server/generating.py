"""Requests to the generating endpoints, for tests that treat them alike."""

from typing import Any

from tests.byte_model import NAME
from tests.server.raw_client import post

STARTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}
PATHS = list(STARTS)


def asking(path: str = PATHS[0], /, **fields: Any) -> bytes:
    """Build a request that generates exactly `max_tokens` reproducible tokens."""
    return post(path, {"model": NAME, **STARTS[path], "seed": 1, "ignore_eos": True, **fields})
