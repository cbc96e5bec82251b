"""Chromium, a server of the bundled model, and visits to its page that fail on browser errors."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

from nvium_core import load_model
from tests.server.live_server import LiveServer, live_server, server_fixture, slowed_down

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync", "--disable-features=LocalNetworkAccessChecks")
FLAGS += ("--host-resolver-rules=MAP *.example 127.0.0.1",)

PROMPT = "Once upon a time"
SECONDS = 60


@dataclass
class Visit:
    """`complaints` are the browser's errors and warnings, with policy violations. `requests` are the requested URLs."""

    server: LiveServer
    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> Locator:
        return self.page.locator("#output span[data-exit]")

    @property
    def hint(self) -> Locator:
        return self.page.locator("#hint")

    def status(self) -> str:
        return self.page.locator("#status").inner_text()

    def trouble(self) -> str:
        """Wait for an error and return its text."""
        self.page.locator("#trouble:not(:empty)").wait_for(timeout=1000 * SECONDS)
        return self.page.locator("#trouble").inner_text()

    def ask(self, prompt: str = PROMPT, **fields: Any) -> None:
        """Fill in fields of the form, by id, and send it. The defaults are temperature 1 and top-p 1."""
        fields = {"temperature": 1, "top_p": 1} | fields
        self.page.fill("#prompt", prompt)
        self.page.eval_on_selector("#settings", "settings => settings.open = true")
        for name, value in fields.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.click("#send")

    def write(self, prompt: str = PROMPT, **fields: Any) -> None:
        """Generate a story and wait for its end."""
        self.ask(prompt, **fields)
        self.page.locator("#status", has_text=" after ").wait_for(timeout=1000 * SECONDS)

    def all_tokens(self) -> list[tuple[str, int]]:
        """Return the text and exit of each token."""
        read = "spans => spans.map(({ textContent, dataset }) => [textContent, Number(dataset.exit)])"
        return [(text, number) for text, number in self.tokens.evaluate_all(read)]

    def check(self) -> None:
        """Check that there were no complaints and no requests to other origins."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(f"{self.server.url}/")] == []


@contextmanager
def visiting(browser: Browser, server: LiveServer, *, stops_opening: bool = True, **options: Any) -> Iterator[Visit]:
    """Open the page. By default, stop the story that is written when it opens. `options` are the browser context's."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        visit = Visit(server, page)

        def note(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                visit.complaints.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: visit.requests.append(request.url))
        page.goto(f"{server.url}/")
        if stops_opening:
            page.locator("#status:not(:empty), #trouble:not(:empty)").first.wait_for(timeout=1000 * SECONDS)
            page.keyboard.press("Escape")
            page.locator("#stop:disabled").wait_for(timeout=1000 * SECONDS)
        yield visit


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


tales = server_fixture(lambda: live_server(load_model(None)), scope="package")


@pytest.fixture
def slow_down(tales: LiveServer) -> Iterator[Callable[[], object]]:
    """Return a function that slows the server down for the rest of the test, so that a story can be stopped."""
    yield partial(slowed_down, tales)
    vars(tales.service.engine.runner).pop("run", None)


@pytest.fixture
def unhurried(slow_down: Callable[[], object]) -> None:
    slow_down()


@pytest.fixture
def visit(chromium: Browser, tales: LiveServer) -> Iterator[Visit]:
    with visiting(chromium, tales) as visit:
        yield visit
        visit.check()
