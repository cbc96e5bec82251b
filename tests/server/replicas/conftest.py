from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nvium_core import LoadedModel
from tests.server.live_server import LiveServer
from tests.server.replicas.ray_cluster import ray_started, replicated


@pytest.fixture(scope="session")
def ray_of_two() -> Iterator[None]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'nvium[ray]'")
    with ray_started(2):
        yield


@pytest.fixture(scope="package")
def server(ray_of_two: None, byte_model: LoadedModel, model_folder: Path) -> Iterator[LiveServer]:
    with replicated(byte_model, model_folder, replicas=2, dtype="float64") as live:
        yield live
