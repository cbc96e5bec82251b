"""Writes long JSON in pieces, so that neither a thread nor the event loop is busy with one string of 100 MB."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 20


class PiecesResponse(Response):
    """A response of JSON in pieces. `scope["state"]["num_unsent"]` is the size of those that have not been sent."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._num_unsent = sum(map(len, pieces))
        self.init_headers({"content-length": str(self._num_unsent), **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            self._num_unsent -= len(piece)
            scope["state"]["num_unsent"] = self._num_unsent
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})


def json_pieces(value: object) -> list[bytes]:
    """Return JSON in pieces of about `PIECE_BYTES`. Iterators are written as arrays, item by item."""
    pieces, last = list[bytes](), bytearray()
    for part in parts(value):
        last += part
        if len(last) >= PIECE_BYTES:
            pieces.append(bytes(last))
            last.clear()
    return [*pieces, bytes(last)]


def parts(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield from enclosed(b"{}", (chain([to_json(name), b":"], parts(item)) for name, item in value.items()))
    elif isinstance(value, Iterator):
        yield from enclosed(b"[]", ([to_json(item)] for item in value))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from enclosed(b"[]", map(parts, value))
    else:
        yield to_json(value)


def enclosed(brackets: bytes, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield brackets[:1]
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from item
    yield brackets[1:]
