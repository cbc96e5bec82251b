"""Replicas that do what a test says, for what real ones do only when they die at the right moment."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from server.replicas.routing import Address, NoReplica

SECRET = "of the replica"
EVENTS = [b'data: {"text":"\xc3\xa9 one"}\n\n', b": keep-alive\n\n", b'data: {"text":"two"}\n\n', b"data: [DONE]\n\n"]


@dataclass(frozen=True)
class Told:
    """What a replica answers: the bytes of its connection, in pieces. It may reset that then, or not."""

    pieces: Sequence[bytes]
    dies: bool = False


def whole(body: bytes, *, sent: int | None = None) -> Told:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return Told([head + body[:sent]], dies=sent is not None)


def stream(body: bytes, *, cuts: Sequence[int] = (), sent: int | None = None) -> Told:
    """Events in pieces that end at the cuts, and no further than `sent`."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    told = body[:sent]
    places = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(told)), len(told)]
    chunks = [told[start:end] for start, end in itertools.pairwise(places) if start < end]
    pieces = [head, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)]
    return Told(pieces, dies=True) if sent is not None else Told([*pieces, b"0\r\n\r\n"])


SILENT = Told([], dies=True)


def endless(body: bytes) -> Told:
    """A stream that stays open."""
    return Told(stream(body).pieces[:-1])


@dataclass
class ScriptedPool:
    """Each request is answered by the next of the script, by a replica of its own; after the last there is none."""

    script: list[Told]
    asked: list[bytes] = field(default_factory=list)
    num_busy: int = 0

    @asynccontextmanager
    async def chosen(self, beginnings: Sequence[bytes], excluded: Collection[str]) -> AsyncIterator[Address]:
        if not self.script:
            raise NoReplica
        told = self.script.pop(0)
        server = await asyncio.start_server(lambda reader, writer: self._answer(told, reader, writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.num_busy += 1
        try:
            yield Address(name=str(port), url=f"http://127.0.0.1:{port}", secret=SECRET)
        finally:
            self.num_busy -= 1
            server.close()

    async def all(self) -> list[Address]:
        raise NoReplica

    async def _answer(self, told: Told, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        self.asked.append(head + await reader.readexactly(length))
        for piece in told.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        if told.dies:
            writer.transport.abort()
        else:
            await reader.read()
            writer.close()
