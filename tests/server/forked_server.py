"""The real server as a process of its own, forked from one that has imported everything, so that it starts at once."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx

from server.app import run
from server.settings import Settings
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess, free_port

READY_SECONDS = 120

forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(["server.app", "tests.server.forked_server"])

Prepare = Callable[[], object]
"""What the new process does before it serves; must be picklable."""

Serving = Callable[[Settings], None]
"""How it serves then; picklable too."""


@dataclass(frozen=True)
class ForkedProcess:
    """What is used of a `subprocess.Popen`."""

    forked: ForkServerProcess

    @property
    def pid(self) -> int:
        assert self.forked.pid
        return self.forked.pid

    def poll(self) -> int | None:
        return self.forked.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.forked.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.forked.join(timeout)
        assert self.forked.exitcode is not None, "it has not ended"
        return self.forked.exitcode


def serve(log: str, environment: dict[str, str], prepare: Prepare | None, serving: Serving) -> None:
    """In the new process: serve, with stderr at the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare:
        prepare()
    serving(Settings())


@contextmanager
def forked_server(
    model_folder: Path,
    log: Path,
    *,
    prepare: Prepare | None = None,
    serving: Serving = run,
    waits: bool = True,
    **options: object,
) -> Iterator[ServerProcess]:
    """Ready when entered, if it is waited for; dead when left. `log` is where its stderr goes, a file or a pipe."""
    options = {"model": model_folder, "port": free_port(), "host": "127.0.0.1", **options}
    environment = {f"NVIUM_{name.upper()}": str(value) for name, value in options.items()}
    process = ForkedProcess(forking.Process(target=serve, args=(str(log), environment, prepare, serving), daemon=True))
    process.forked.start()
    with httpx.Client(base_url=f"http://{options['host']}:{options['port']}", timeout=30) as http:
        server = ServerProcess(process, http, log)
        try:
            if waits:
                wait_until(lambda: server.is_ready or process.poll() is not None, seconds=READY_SECONDS)
                assert process.poll() is None, f"it ended with {process.poll()}"
            yield server
        finally:
            process.kill()
            process.wait()
