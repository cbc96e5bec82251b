"""The bundled model behind `nvium serve`, a process of its own: what other people's programs are pointed at."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.server.live_server import wait_until

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "nvium_core" / "checkpoints"
START_SECONDS = 120
STOP_SECONDS = 20


@dataclass(frozen=True)
class Served:
    """A running server: the address of its API, its model's name, and the model's folder."""

    url: str
    model: str

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def folder(self) -> Path:
        return CHECKPOINTS / self.model

    def samples(self) -> list[Sample]:
        """The server's metrics."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        return [sample for family in families for sample in family.samples]


@contextmanager
def served(**settings: object) -> Iterator[Served]:
    """A server of the bundled model in float32 on the CPU, ready; it must also stop as it should."""
    given = {"port": free_port(), "dtype": "float32", "device": "cpu", **settings}
    environment = {f"NVIUM_{name.upper()}": str(value) for name, value in given.items()}
    url = f"http://127.0.0.1:{given['port']}"
    command = [sys.executable, "-m", "nvium_core.cli", "serve"]
    with (
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stderr=subprocess.DEVNULL
        ) as process,
        httpx.Client(base_url=url, timeout=10) as http,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_ready(http), seconds=START_SECONDS)
            yield Served(url, http.get("/v1/models").json()["data"][0]["id"])
        finally:
            process.terminate()
            try:
                exit_code = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert exit_code == 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
