"""Scripted replicas, for failures that real replicas only show if they die at the right moment."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from server.replicas.fleet import Fleet, Replica, no_replica
from server.settings import Settings

EVENTS = [b'data: {"text":"\xc3\xa9 one"}\n\n', b": keep-alive\n\n", b'data: {"text":"two"}\n\n', b"data: [DONE]\n\n"]


@dataclass(frozen=True)
class Reply:
    """The bytes that a replica sends, in pieces. If it `dies`, it then resets the connection."""

    pieces: Sequence[bytes]
    dies: bool = False


def whole(body: bytes, *, sent: int | None = None) -> Reply:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return Reply([head + body[:sent]], dies=sent is not None)


def stream(body: bytes, *, cuts: Sequence[int] = (), sent: int | None = None) -> Reply:
    """Cut a stream of events into chunks. With `sent`, the replica dies after that many bytes."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    body = body[:sent]
    places = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(body)), len(body)]
    chunks = [body[start:end] for start, end in itertools.pairwise(places) if start < end]
    pieces = [head, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)]
    return Reply(pieces, dies=True) if sent is not None else Reply([*pieces, b"0\r\n\r\n"])


SILENT = Reply([], dies=True)


def endless(body: bytes) -> Reply:
    """Return a stream that stays open."""
    return Reply(stream(body).pieces[:-1])


class ScriptedFleet(Fleet):
    """Starts a new replica for each request, with the script's next reply. Has no replica after the last reply."""

    has_failed = False

    def __init__(self, script: list[Reply]) -> None:
        self.script, self.received = script, list[bytes]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.replicas, self._servers = [], []
        yield
        for replica, server in zip(self.replicas, self._servers, strict=True):
            assert replica.num_requests == 0
            await replica.session.close()
            server.close()

    async def chosen(self, lost: Collection[Replica]) -> Replica:
        if not self.script:
            raise no_replica()
        replica, reply = Replica(len(self.replicas), Settings(), is_on_gpu=False), self.script.pop(0)
        replica.connect()
        replica.is_ready = True
        self.replicas.append(replica)
        self._servers.append(await asyncio.start_unix_server(partial(self._answer, reply), f"\0{replica.address}"))
        return replica

    async def _answer(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
        self.received.append(head + await reader.readexactly(int(length[1]) if length else 0))
        for piece in reply.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        if reply.dies:
            writer.transport.abort()
        else:
            await reader.read()
            writer.close()
