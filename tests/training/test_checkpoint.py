import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nvium_core.training.checkpoint import STATE, read_state
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from tests.training.small_runs import advance, options, small_recipe, start


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """A run stopped after step 9, with a checkpoint of step 8."""
    run_options = options(tmp_path_factory.mktemp("stopped") / "run")
    advance(start(small_recipe(), run_options), 9)
    return run_options


@pytest.fixture
def folder(stopped: RunOptions, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped.folder, tmp_path / "run"))


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02}u.", b"\x80\x02X\x01\x00\x00\x00\x99."])
def test_a_file_that_is_no_checkpoint_is_reported_as_damaged(tmp_path, content):
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"state\.pt: damaged"):
        read_state(tmp_path)


@pytest.mark.parametrize("setting", ["optimizer.weight_decay=0.2", "beta.initial=0.5"])
def test_a_run_does_not_resume_with_another_recipe(stopped, folder, setting):
    with pytest.raises(TrainingError, match=f"checkpoint's {setting.partition('=')[0]} differ from the recipe's"):
        start(small_recipe(setting), replace(stopped, folder=folder))
