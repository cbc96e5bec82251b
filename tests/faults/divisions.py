"""Faults of one of the replicas behind a gateway."""

import asyncio
import signal
from random import Random

from tests.faults.cluster import Cluster
from tests.faults.kinds import signalled, slowed
from tests.server.server_process import ServerProcess

HANG_SECONDS = 6
"""Longer than the gateway takes to detect that a replica hangs."""


def some_replica(server: ServerProcess, chance: Random) -> ServerProcess:
    assert isinstance(server, Cluster)
    return chance.choice(server.replicas)


async def replica_killed(server: ServerProcess, chance: Random) -> None:
    await signalled(signal.SIGKILL, some_replica(server, chance), chance)


async def replica_hangs(server: ServerProcess, chance: Random) -> None:
    replica = some_replica(server, chance)
    replica.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(HANG_SECONDS)
    replica.process.send_signal(signal.SIGCONT)


async def replica_slowed(server: ServerProcess, chance: Random) -> None:
    await slowed(some_replica(server, chance), chance)
