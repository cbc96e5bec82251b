"""The endpoints that generate, each with what it generates from, so that a test asks all of them alike."""

from typing import Any

from tests.byte_model import NAME
from tests.server.raw_client import post

STARTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}
PATHS = list(STARTS)


def asking(path: str = PATHS[0], /, **fields: Any) -> bytes:
    """A request that gives the same tokens every time, `max_tokens` of them."""
    return post(path, {"model": NAME, **STARTS[path], "seed": 1, "ignore_eos": True, **fields})
