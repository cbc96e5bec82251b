"""Target: the connection parses the same requests from the same bytes, however they are cut into pieces."""

import asyncio
import hashlib
import re
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.http.config import uvicorn_config
from server.settings import Settings
from server.telemetry.metrics import Metrics
from tests.fuzzing.choices import Choices
from tests.server.raw_client import chunked, post, request

MAX_PIECES = 6
STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)")

SEEDS = [
    request("/", b"", method="GET"),
    post("/v1/completions", {"prompt": "a"}),
    post("/v1/completions", {"prompt": "a" * 40}, is_chunked=True) + request("/livez", method="GET"),
    b"GET / HTTP/1.0\r\n\r\n",
    b"HEAD /a?b=%20c HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc" + request("/", method="GET"),
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\ntrailer: 1\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
    b"GET / HTTP/1.1\nhost: x\n\n",
    b"GET http://x/y HTTP/1.1\r\nhost: x\r\n\r\nPOST /z HTTP/1.1\r\nhost: x\r\n\r\n" + chunked(b"abc"),
]


def seeds() -> Iterator[bytes]:
    """Yield streams, each after two bytes that determine the cuts."""
    yield from (bytes([number, 3 * number]) + seed for number, seed in enumerate(SEEDS))


def target() -> Callable[[bytes], None]:
    loop = asyncio.new_event_loop()
    app = cast(Any, digests)
    app.state = SimpleNamespace(service=SimpleNamespace(metrics=Metrics([1.0])))
    config = uvicorn_config(app, Settings())

    def check(data: bytes) -> None:
        cut, stream = Choices(data[:2]), data[2:]
        places = sorted(cut.randrange(len(stream) + 1) for _ in range(cut.randrange(1, MAX_PIECES)))
        pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
        whole = loop.run_until_complete(responses(config, loop, [stream]))
        in_pieces = loop.run_until_complete(responses(config, loop, pieces))
        assert whole == in_pieces, f"whole {whole}, in pieces {in_pieces}"

    weakref.finalize(check, loop.close)
    return check


async def responses(config: Any, loop: asyncio.AbstractEventLoop, pieces: list[bytes]) -> list[bytes]:
    """Return the statuses of all responses, and digests of the requests that reached the app."""
    transport = Transport()
    connection = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    connection.connection_made(transport)
    for piece in pieces:
        if piece and not transport.is_closed:
            connection.data_received(piece)
            await settled(transport)
    connection.connection_lost(None)
    await settled(transport)
    written = bytes(transport.written)
    return [*STATUS.findall(written), *re.findall(rb"<[0-9a-f]+>", written)]


async def settled(transport: "Transport") -> None:
    """Wait until nothing more is written. The requests of one piece are answered one after another."""
    before = -1
    while before < (before := len(transport.written)):
        for _ in range(8):
            await asyncio.sleep(0)


async def digests(scope: Scope, receive: Receive, send: Send) -> None:
    headers = (b"%b: %b" % header for header in scope["headers"])
    seen = [scope["method"].encode(), scope["raw_path"], scope["query_string"], *headers]
    num_seen = len(seen)
    while (message := await receive())["type"] == "http.request":
        seen.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    else:
        return
    body = b"<%b>" % hashlib.sha256(b"\0".join([*seen[:num_seen], b"".join(seen[num_seen:])])).hexdigest().encode()
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed, "write after close"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass
