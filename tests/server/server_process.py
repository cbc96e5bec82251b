"""Runs the real server in its own process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.server.live_server import wait_until

CODE = "import sys; sys.argv[0] = 'nvium'; from nvium_core.commands.running import serve; serve()"


@dataclass(frozen=True)
class ServerProcess:
    """`process` is a `subprocess.Popen` or a `ForkedProcess`."""

    process: Any
    http: httpx.Client
    log_file: Path

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @property
    def is_ready(self) -> bool:
        return self.status("/readyz") == 200

    def status(self, path: str) -> int:
        """Return the status of a response, 0 if the server cannot be reached."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self, seconds: float) -> int:
        """Wait at most `seconds` for the process to end, and return its exit code."""
        return self.process.wait(timeout=seconds)

    def log(self) -> str:
        return self.log_file.read_text()


@contextmanager
def server_process(
    model_folder: Path, log_folder: Path, code: str = CODE, variables: Mapping[str, str] = {}, **options: object
) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and kill it at the end. `variables` are added to the environment."""
    options = {"model": model_folder, "port": free_port(), **options}
    environment = os.environ | {f"NVIUM_{name.upper()}": str(value) for name, value in options.items()} | variables
    log_file = log_folder / "server.log"
    with log_file.open("wb") as log, httpx.Client(base_url=f"http://127.0.0.1:{options['port']}", timeout=30) as http:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=log, env=environment)
        try:
            server = ServerProcess(process, http, log_file)
            wait_until(lambda: server.is_ready, seconds=120)
            yield server
        finally:
            process.kill()
            process.wait()


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, and of theirs."""
    found = list[int]()
    with suppress(OSError):
        lists = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
        for child in [int(child) for text in lists for child in text.split()]:
            found += [child, *descendants(child)]
    return found


def name_of(pid: int) -> str:
    """Return the command line of a process. Empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0")
    return ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
