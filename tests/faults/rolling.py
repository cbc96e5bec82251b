"""From one server to the next behind one address: the next is ready first, then the one before is told to end."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from tests.faults.balancer import Balancer, balanced
from tests.faults.load import KEY, Known, Load, Spoken
from tests.server.server_process import ServerProcess

NUM_CLIENTS = 6
APART_SECONDS = 2
END_SECONDS = 60

Start = Callable[[], AbstractContextManager[ServerProcess]]


@dataclass(frozen=True)
class Move:
    """`running`: sequences of the server when it was told to end. `lost` requests got no whole answer and no error."""

    running: int
    right: int
    wrong: int
    lost: int
    failed: int
    refused: int
    drain_seconds: float
    exit_code: int


async def moves(starts: Sequence[Start], expected: dict[Known, Spoken]) -> list[Move]:
    """From each server to the next, under load."""
    told = []
    with ExitStack() as servers:
        async with balanced() as (balancer, url):
            old = await asyncio.to_thread(servers.enter_context, starts[0]())
            for number, start in enumerate(starts[1:]):
                await balancer.use([old.url])
                load = Load(expected, number)
                asking = asyncio.create_task(load.run(url, NUM_CLIENTS))
                new = await asyncio.to_thread(servers.enter_context, start())
                told.append(await moved(balancer, old, new, load))
                await asking
                old = new
    return told


async def moved(balancer: Balancer, old: ServerProcess, new: ServerProcess, load: Load) -> Move:
    """Both are used for a while; the old one gets no new connections before it is told to end, as by the Helm chart."""
    await balancer.use([old.url, new.url])
    await asyncio.sleep(APART_SECONDS)
    await balancer.use([new.url])
    running, began = await asyncio.to_thread(num_running, old), time.monotonic()
    old.terminate()
    exit_code = await asyncio.to_thread(old.exit_code, END_SECONDS)
    drain_seconds = round(time.monotonic() - began, 2)
    await asyncio.sleep(APART_SECONDS)
    load.is_over = True
    counts = load.tally
    lost = sum(counts[name] for name in ("cut", "dropped", "unanswered", "nobody there"))
    rest = {name: counts[name] for name in ("right", "wrong", "failed", "refused")}
    return Move(running=running, lost=lost, drain_seconds=drain_seconds, exit_code=exit_code, **rest)


def num_running(server: ServerProcess) -> int:
    page = server.http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return int(float(re.findall(r"^nvium_requests_running (\S+)$", page, re.MULTILINE)[0]))
