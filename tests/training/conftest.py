"""What several files of tests compare with."""

import shutil
from pathlib import Path

import pytest
import torch

from nvium_core.training.options import RunOptions
from tests.training.small_runs import finished, options, small_recipe, start


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that a small run ends with."""
    return finished(start(small_recipe(), options(tmp_path_factory.mktemp("whole") / "run")))


@pytest.fixture
def folder(stopped: RunOptions, tmp_path: Path) -> Path:
    """A copy of a stopped run's folder."""
    return Path(shutil.copytree(stopped.folder, tmp_path / "run"))
