"""What is done to one of the replicas behind a front, and to an engine that has a process of its own."""

import asyncio
import os
import signal
from pathlib import Path
from random import Random

from tests.faults.cluster import Cluster
from tests.server.server_process import ServerProcess

HANG_SECONDS = 6
"""More than it takes to find out that a replica says nothing."""


def some_replica(server: ServerProcess, chance: Random) -> int:
    assert isinstance(server, Cluster)
    return chance.randrange(len(server.replicas))


def replicas_of(server: ServerProcess) -> tuple[ServerProcess, ...]:
    assert isinstance(server, Cluster)
    return server.replicas


async def replica_killed(server: ServerProcess, chance: Random) -> None:
    await asyncio.sleep(chance.random())
    replicas_of(server)[some_replica(server, chance)].process.send_signal(signal.SIGKILL)


async def replica_hangs(server: ServerProcess, chance: Random) -> None:
    replica = replicas_of(server)[some_replica(server, chance)]
    replica.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(HANG_SECONDS)
    replica.process.send_signal(signal.SIGCONT)


async def replica_slowed(server: ServerProcess, chance: Random) -> None:
    """One that goes on for a fifth of the time."""
    replica = replicas_of(server)[some_replica(server, chance)]
    for _ in range(20):
        replica.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.16)
        replica.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.04)


def engine_of(server: ServerProcess) -> int:
    """The process of an engine, among its server's children."""
    pid = server.process.pid
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [engine] = [int(child) for child in listed if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return engine


async def engine_killed(server: ServerProcess, chance: Random) -> None:
    await asyncio.sleep(chance.random())
    os.kill(engine_of(server), signal.SIGKILL)


async def engine_paused(server: ServerProcess, chance: Random) -> None:
    engine = engine_of(server)
    os.kill(engine, signal.SIGSTOP)
    await asyncio.sleep(1 + 2 * chance.random())
    os.kill(engine, signal.SIGCONT)
