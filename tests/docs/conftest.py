"""A server of the bundled model, shared by all tests of pages."""

from collections.abc import Iterator

import pytest

from nvium_core import load_model
from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server(load_model(device="cpu"), drain_seconds=1) as server:
        yield server
