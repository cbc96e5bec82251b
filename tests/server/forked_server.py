"""Runs the real server in its own process, forked from one that has imported everything, so it starts fast."""

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
from server.telemetry.logs import configure_logs
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess, free_port

READY_SECONDS = 120

forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(["server.app", "tests.server.forked_server"])

Prepare = Callable[[], object]
"""Called in the new process before it serves. Must be picklable."""

Serving = Callable[[Settings], None]
"""Called in the new process to serve. Must be picklable."""


@dataclass(frozen=True)
class ForkedProcess:
    """A forked process with the methods of `subprocess.Popen` that tests use."""

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
        assert self.forked.exitcode is not None, "the process has not ended"
        return self.forked.exitcode


def serve(log: str, environment: dict[str, str], prepare: Prepare | None, serving: Serving) -> None:
    """Serve in the new process. `log` is the file or pipe for its stderr."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare:
        prepare()
    settings = Settings()
    configure_logs(settings.log_level)
    serving(settings)


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
    """Start a server, wait until it is ready if it `waits`, and kill it at the end. `log` receives its stderr."""
    options = {"model": model_folder, "port": free_port(), "host": "127.0.0.1", **options}
    environment = {f"NVIUM_{name.upper()}": str(value) for name, value in options.items()}
    process = ForkedProcess(forking.Process(target=serve, args=(str(log), environment, prepare, serving), daemon=True))
    process.forked.start()
    with httpx.Client(base_url=f"http://{options['host']}:{options['port']}", timeout=30) as http:
        server = ServerProcess(process, http, log)
        try:
            if waits:
                wait_until(lambda: server.is_ready or process.poll() is not None, seconds=READY_SECONDS)
                assert process.poll() is None, f"the server ended with {process.poll()}"
            yield server
        finally:
            process.kill()
            process.wait()
