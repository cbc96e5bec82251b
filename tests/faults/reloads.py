"""SIGHUP at random moments. It reloads a key file."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.server.forked_server import forked_server
from tests.server.server_process import ServerProcess

NUM_SIGNALS = 200
SIGNALS_SECONDS = 2


@contextmanager
def server_with_key_file(model_folder: Path, log: Path, **options: object) -> Iterator[ServerProcess]:
    keys = log.with_name("keys")
    keys.write_text("sk-of-the-file\n")
    with forked_server(model_folder, log, api_keys_file=keys, **options) as server:
        yield server


async def reload_keys(server: ServerProcess, chance: Random) -> None:
    for _ in range(NUM_SIGNALS):
        server.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(2 * chance.random() * SIGNALS_SECONDS / NUM_SIGNALS)
