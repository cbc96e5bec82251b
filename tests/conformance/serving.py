"""The bundled model behind `nvium serve`, a process of its own: what other people's programs are pointed at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nvium_core.loading import bundled_model
from tests.server.server_process import server_process

ROOT = Path(__file__).parents[2]
SERVE = "import sys; from nvium_core.cli import main; sys.argv = ['nvium', 'serve']; main()"
STOP_SECONDS = 20


@dataclass(frozen=True)
class Served:
    """A running server: the address of its API, its model's name, and the model's folder."""

    url: str
    model: str
    folder: Path

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    def samples(self) -> list[Sample]:
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        return [sample for family in families for sample in family.samples]


@contextmanager
def served(**settings: object) -> Iterator[Served]:
    """A server of the bundled model in float32 on the CPU, ready; it must also stop as it should."""
    folder, given = bundled_model(), {"dtype": "float32", "device": "cpu", **settings}
    one_thread = {"OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as logs, server_process(folder, Path(logs), SERVE, one_thread, **given) as server:
        yield Served(server.url, server.http.get("/v1/models").json()["data"][0]["id"], folder)
        server.terminate()
        assert server.exit_code(STOP_SECONDS) == 0
