"""Reloads: a file of keys that changes under a server, a new one each time, the old one gone, an invalid file now and
then; and SIGHUP in the midst of anything."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx

from tests.faults.load import KEY
from tests.server.forked_server import forked_server
from tests.server.server_process import ServerProcess

EVERY_SECONDS = 10
INVALID_EACH = 5
APPLIED_SECONDS = 2
NUM_SIGNALS = 200
SIGNALS_SECONDS = 2


class Reloads:
    """`counts`: files taken, invalid ones that changed nothing, and what was otherwise than it should be."""

    def __init__(self, server: ServerProcess, keys: Path) -> None:
        self._server = server
        self._keys = keys
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=60) as http:
            before, number = "sk-0", 0
            while True:
                await asyncio.sleep(EVERY_SECONDS)
                number += 1
                if number % INVALID_EACH == 0:
                    await self._write("a key with spaces\n")
                    self.counts["as it was" if await status(http, before) == 200 else "wrong"] += 1
                else:
                    await self._write(f"{KEY}\n{(key := f'sk-{number}')}\n")
                    statuses = [await status(http, key), await status(http, before)]
                    self.counts["taken" if statuses == [200, 401] else "wrong"] += 1
                    before = key

    async def _write(self, content: str) -> None:
        self._keys.write_text(content)
        self._server.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(APPLIED_SECONDS)


@contextmanager
def with_a_file_of_keys(model_folder: Path, log: Path, **options: object) -> Iterator[ServerProcess]:
    keys = log.with_name("keys")
    keys.write_text("sk-of-the-file\n")
    with forked_server(model_folder, log, api_keys_file=keys, **options) as server:
        yield server


async def reloaded_again_and_again(server: ServerProcess, chance: Random) -> None:
    for _ in range(NUM_SIGNALS):
        server.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(2 * chance.random() * SIGNALS_SECONDS / NUM_SIGNALS)


async def status(http: httpx.AsyncClient, key: str) -> int:
    """0 if there is no answer."""
    try:
        return (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code
    except httpx.TransportError:
        return 0
