"""A gateway whose replicas are signalled one by one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.replicas.gateway import run
from tests.server.forked_server import forked_server
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess, descendants, name_of

READY_SECONDS = 120


def replicas_of(pid: int) -> set[int]:
    """Return the process ids of a gateway's replicas."""
    return {child for child in descendants(pid) if "server.replicas.replica" in name_of(child)}


@dataclass(frozen=True)
class ReplicaProcess:
    pid: int

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the gateway may have killed it
            os.kill(self.pid, number)


class Cluster(ServerProcess):
    """A gateway's process."""

    @property
    def replicas(self) -> list[ServerProcess]:
        pids = sorted(replicas_of(self.process.pid))
        return [ServerProcess(ReplicaProcess(pid), self.http, self.log_file) for pid in pids]


@contextmanager
def cluster(model_folder: Path, log: Path, *, replicas: int = 2, **options: Any) -> Iterator[Cluster]:
    """Start a gateway and wait until all replicas are ready. `options` are those of `forked_server`."""
    with forked_server(model_folder, log, serving=run, replicas=replicas, **options) as server:
        wait_until(lambda: '"event": "ready"' in log.read_text(), seconds=READY_SECONDS)
        yield Cluster(server.process, server.http, log)
