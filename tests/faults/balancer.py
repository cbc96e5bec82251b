"""One address for several servers: each connection goes to one that says it is ready, as with a cluster's service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx

from tests.server.raw_client import asked, request

EVERY_SECONDS = 0.2
PROBE = request("/readyz", method="GET")
PIECE_BYTES = 65_536


class Balancer:
    """They take turns."""

    def __init__(self) -> None:
        self._servers: list[str] = []
        self._ready: list[str] = []
        self._turn = 0

    async def use(self, servers: list[str]) -> None:
        """Those at these URLs, from now on."""
        self._servers = servers
        await self._look()

    async def probe(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self._look()

    async def _look(self) -> None:
        self._ready = [url for url in self._servers if await is_ready(url)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._ready:
            writer.close()
            return
        self._turn += 1
        url = httpx.URL(self._ready[self._turn % len(self._ready)])
        try:
            theirs, ours = await asyncio.open_connection(url.host, url.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))


async def is_ready(url: str) -> bool:
    with suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(2):
            return (await asked(url, PROBE)).status == 200
    return False


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To the end of either."""
    with suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balanced() -> AsyncIterator[tuple[Balancer, str]]:
    """The balancer, and its address."""
    balancer = Balancer()
    listening = await asyncio.start_server(balancer.serve, "127.0.0.1", 0)
    probing = asyncio.create_task(balancer.probe())
    try:
        yield balancer, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        probing.cancel()
        listening.close()
