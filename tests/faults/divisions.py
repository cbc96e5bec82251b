"""What is done to one of the replicas behind a front."""

import asyncio
import signal
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
