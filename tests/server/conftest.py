"""A server that is shared by all tests that do not change them. Log lines are hidden."""

import time
from collections.abc import Iterator

import pytest
import structlog

from nvium_core import LoadedModel
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult
from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="session", autouse=True)
def no_log_lines() -> Iterator[None]:
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def server(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model) as live:
        yield live


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow the engine down, so a stream sends its tokens in several chunks."""
    run = Runner.run

    def paced(runner: Runner, step: Step) -> StepResult:
        time.sleep(0.003)
        return run(runner, step)

    monkeypatch.setattr(Runner, "run", paced)
