from collections.abc import Iterator
from pathlib import Path

import pytest

from nvium_core import LoadedModel
from server.replicas.fleet import Fleet
from server.replicas.gateway import Gateway, gateway_app
from server.settings import Settings
from server.telemetry.metrics import Metrics
from tests.server.live_server import LiveServer, live_server


def build(_: LoadedModel, settings: Settings) -> object:
    metrics = Metrics()
    return gateway_app(Gateway(Fleet(settings, metrics), settings, metrics))


@pytest.fixture(scope="package")
def server(byte_model: LoadedModel, model_folder: Path) -> Iterator[LiveServer]:
    """A gateway with two replicas. The server's `gauge` sums a metric over all of them."""
    with live_server(byte_model, build=build, model=str(model_folder), replicas=2, dtype="float64") as live:
        live.service.fleet.started.result(120)
        yield live
