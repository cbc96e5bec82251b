"""Settings of all tests.

One thread per process: faster for small matrices, and reproducible on any machine.
Hypothesis draws the same examples in each run, so that a commit passes or fails by itself;
`pytest --hypothesis-profile=thorough` draws ten times as many, others each time.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

from nvium_core import LoadedModel, cli
from tests.byte_model import NAME, load_byte_model, save_byte_model

torch.set_num_threads(1)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile("default")


class Printed(NamedTuple):
    out: str
    err: str


class Nvium:
    """The `nvium` command, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, exit_code: int = 0) -> Printed:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["nvium", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        printed = Printed(*self._capsys.readouterr())
        assert ending.value.code == exit_code, printed.err
        return printed

    def refuses(self, *arguments: object) -> str:
        """Return the complaint about a user's error: one line on stderr, nothing on stdout, exit code 2."""
        printed = self(*arguments, exit_code=2)
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err


@pytest.fixture(scope="session")
def byte_model() -> LoadedModel:
    """A model that is shared by all tests that do not change it."""
    return load_byte_model()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture
def nvium(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nvium:
    return Nvium(monkeypatch, capsys)
