"""A server of the bundled model, shared by all tests of pages."""

from nvium_core import load_model
from tests.server.live_server import live_server, server_fixture

server = server_fixture(lambda: live_server(load_model(device="cpu"), drain_seconds=1), scope="session")
