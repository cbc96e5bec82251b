"""Chromium, a server of the bundled model, and visits that fail on browser errors."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from nvium_core import load_model
from tests.server.live_server import LiveServer, live_server
from tests.server.playground.slow import slowed_down
from tests.server.playground.visit import Visit, visiting

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks",
)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tales() -> Iterator[LiveServer]:
    with live_server(load_model(None)) as live:
        yield live


@pytest.fixture
def unhurried(tales: LiveServer) -> Iterator[None]:
    """Slow the server down, so a test can stop a story before it ends."""
    runner = tales.service.engine.runner
    slowed_down(tales)
    yield
    tales.service.engine.runner = runner


@pytest.fixture
def visit(chromium: Browser, tales: LiveServer) -> Iterator[Visit]:
    with visiting(chromium, tales) as visit:
        yield visit
        visit.check()
