"""A small completions server that streams scripted events over a real socket, one request per connection."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.client import LoadClient

HEAD = "HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass(kw_only=True)
class FakeServer:
    """Answers each request with `events`, `gap` seconds apart, and records heads and bodies.

    num_answers: number of requests that are answered; later ones wait until their clients disconnect.
    """

    events: Iterable[str]
    status: str = "200 OK"
    gap: float = 0.0
    num_answers: int = 1000
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.bodies.append(await self._read(head, reader))
        if len(self.bodies) > self.num_answers:
            await reader.read()
        writer.write(HEAD.format(status=self.status).encode())
        for event in self.events:
            await asyncio.sleep(self.gap)
            writer.write(f"{event}\n\n".encode())
            await writer.drain()
        self.num_running -= 1
        writer.close()
        await writer.wait_closed()

    async def _read(self, head: str, reader: asyncio.StreamReader) -> dict[str, Any]:
        self.headers.append(head)
        [length] = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
        body: dict[str, Any] = json.loads(await reader.readexactly(int(length)))
        return body


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """Yield the base URL of the running server."""
    async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@asynccontextmanager
async def client_of(server: FakeServer, kind: Any = LoadClient, **settings: Any) -> AsyncIterator[LoadClient]:
    async with serving(server) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        yield kind(http, **settings)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (the server has no event to wait for)
        await asyncio.sleep(0.001)


def chunk(text: str, token_ids: list[int] | None = None, exits: list[int] | None = None) -> str:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
    if token_ids is not None:
        choice["nvium"] = {"token_ids": token_ids, "exits": exits}
    return f"data: {json.dumps({'choices': [choice]})}"


def usage(prompt_tokens: int, completion_tokens: int) -> str:
    numbers = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return f"data: {json.dumps({'choices': [], 'usage': numbers})}"


DONE = "data: [DONE]"
STORY = [": keep-alive", chunk(" a", [7], [1]), chunk("", [], []), chunk(" fox", [8, 9], [3, 1]), usage(5, 3), DONE]
