"""A client that costs next to nothing, for measuring a server's costs on the machine that both share.

It parses only the end of a stream. `loadtest.client` spends about as much on a token as a server does.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from loadtest.client import BROKEN, DONE, ServerError

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')

TAIL_BYTES = 2_000
"""More than a stream's last chunk, usage and end take."""


async def num_streamed(base_url: str, bodies: Sequence[dict[str, Any]]) -> int:
    """Tokens of completions requested at once. Raises `ServerError`."""
    return sum(await asyncio.gather(*(stream(base_url, body) for body in bodies)))


async def stream(base_url: str, body: dict[str, Any]) -> int:
    """Tokens of one completion, from its usage. Raises `ServerError`."""
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    try:
        writer.write(request(address.netloc, body))
        status, tail = await reader.readline(), b""
        while piece := await reader.read(2**16):
            tail = (tail + piece)[-TAIL_BYTES:]
            if DONE.encode() in tail:
                break
    finally:
        writer.close()
    return counted(status.decode("latin-1"), tail)


def request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content


def counted(status: str, tail: bytes) -> int:
    code = status.partition(" ")[2].strip()
    if not code.startswith("200"):
        raise ServerError(f"HTTP {code[:3]}", tail.decode(errors="replace"))
    if DONE.encode() not in tail or not (usage := USAGE.search(tail)):
        raise ServerError(BROKEN, f"it ended without {DONE} or without usage")
    return int(usage[1])
