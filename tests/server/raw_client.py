"""An HTTP client that can send broken or incomplete requests, fall silent, and stop reading, and its requests."""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from tests.byte_model import NAME

Json = dict[str, Any]

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        return events_of(self.body.decode())

    def choices(self) -> list[Any]:
        """Return the choices of a whole response, or of all chunks of a stream."""
        is_stream = self.headers["content-type"].startswith("text/event-stream")
        return [choice for body in (self.events() if is_stream else [self.json()]) for choice in body["choices"]]

    def spoken(self) -> dict[int, list[tuple[int, int]]]:
        """Return the tokens of each choice with their exits."""
        spoken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for choice in self.choices():
            spoken[choice["index"]] += zip(choice["nvium"]["token_ids"], choice["nvium"]["exits"], strict=True)
        return dict(spoken)

    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices() if choice["finish_reason"]]


def error_of(response: httpx.Response | Answer) -> dict[str, Any]:
    """Return the error in a body, and check that it has exactly OpenAI's format."""
    body: dict[str, dict[str, Any]] = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    return body["error"]


def events_of(stream: str) -> list[Any]:
    """Return the contents of a stream's events. Check that the stream ends with `[DONE]`."""
    *events, done, end = stream.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.split("data: ", 1)[1]) for event in events if not event.startswith(":")]


def streamed(ask: Callable[..., httpx.Response], **body: Any) -> list[Json]:
    """Return the chunks of a streamed answer of `LiveServer.complete` or `.chat`."""
    response = ask(stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._begun = b""
        self.has_heard = False
        """The head of a response has arrived."""

    async def ask(self, data: bytes, method: str = "POST") -> Answer:
        await self.send(data)
        return await self.answer(method)

    async def send(self, data: bytes) -> None:
        """Send data. Ignore a closed connection: the server may have refused the request early."""
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    async def has_answer(self) -> bool:
        """Wait for data or the end of the connection. Return whether data has arrived."""
        with suppress(ConnectionError):
            self._begun += await self.reader.read(1)
        return bool(self._begun)

    async def answer(self, method: str = "POST") -> Answer:
        status, headers = await self.head()
        return Answer(status, headers, b"" if method == "HEAD" else await self._body(headers))

    async def head(self) -> tuple[int, dict[str, str]]:
        head, self._begun = self._begun + await self.reader.readuntil(b"\r\n\r\n"), b""
        self.has_heard = True
        status_line, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = (line.split(": ", 1) for line in lines)
        return int(status_line.split(" ")[1]), {name.lower(): value for name, value in headers}

    async def chunk(self) -> bytes:
        """Read a chunk of the body. Empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        """Read the remaining chunks of the body."""
        body = bytearray()
        while chunk := await self.chunk():
            body += chunk
        return bytes(body)

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        return await self.rest()


@asynccontextmanager
async def connected(url: str, *, receive_bytes: int | None = None) -> AsyncIterator[RawConnection]:
    """Open a connection. `receive_bytes` is the size of its receive buffer."""
    address = httpx.URL(url)
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(raw, (address.host, address.port))
    except BaseException:
        raw.close()
        raise
    reader, writer = await asyncio.open_connection(sock=raw, limit=receive_bytes or 2**20)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def asked(url: str, data: bytes, method: str = "POST") -> Answer:
    """Send one request on a new connection and return the response."""
    async with connected(url) as connection:
        return await connection.ask(data, method)


def request(
    path: str, body: bytes = b"", *, method: str = "POST", headers: Mapping[str, str] = JSON, is_chunked: bool = False
) -> bytes:
    length = {"transfer-encoding": "chunked"} if is_chunked else {"content-length": str(len(body))}
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"{name}: {value}" for name, value in {**headers, **length}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (chunked(body) if is_chunked else body)


def chunked(body: bytes, size: int = 1000) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def post(path: str, body: object, **options: Any) -> bytes:
    return request(path, json.dumps(body).encode(), **options)


STARTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}
PATHS = list(STARTS)


def asking(path: str = PATHS[0], /, **fields: Any) -> bytes:
    """Build a request that generates exactly `max_tokens` reproducible tokens."""
    return post(path, {"model": NAME, **STARTS[path], "seed": 1, "ignore_eos": True, **fields})
