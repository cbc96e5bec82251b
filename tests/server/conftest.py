"""One model and one server for all tests that do not change them; log lines kept off the terminal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from nvium_core import LoadedModel
from tests.byte_model import NAME, load_byte_model
from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def byte_model() -> LoadedModel:
    return load_byte_model()


@pytest.fixture(scope="session")
def model_folder(byte_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / NAME
    byte_model.model.save_pretrained(folder)
    byte_model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_log_lines() -> Iterator[None]:
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def server(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model) as live:
        yield live
