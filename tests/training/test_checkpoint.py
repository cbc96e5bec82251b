"""A checkpoint is used as it was written, by the run that wrote it, or is refused by name."""

from pathlib import Path

import pytest
import torch

from nvium_core.training.checkpoint import PREVIOUS, STATE, loaded, read_state
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from tests.training.small_runs import advance, assert_equal, finished, options, small_recipe, start


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """A run stopped after step 9, its checkpoints being of steps 8 and 4."""
    run_options = options(tmp_path_factory.mktemp("stopped") / "run")
    advance(start(small_recipe(), run_options), 9)
    return run_options


def resumed(stopped: RunOptions, folder: Path, **changes: object) -> RunOptions:
    return RunOptions(**{**vars(stopped), "folder": folder, **changes})  # type: ignore[arg-type]


def test_a_damaged_checkpoint_offers_the_one_before_which_ends_with_the_same_weights(
    uninterrupted: dict[str, torch.Tensor], stopped: RunOptions, folder: Path
) -> None:
    (folder / STATE).write_bytes(b"damaged")
    with pytest.raises(TrainingError, match=r"state\.pt: damaged .*or move \S*state\.previous\.pt there"):
        start(small_recipe(), resumed(stopped, folder))
    (folder / PREVIOUS).replace(folder / STATE)
    assert_equal(finished(start(small_recipe(), resumed(stopped, folder))), uninterrupted)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02}u.", b"\x80\x02X\x01\x00\x00\x00\x99."])
def test_a_file_that_is_no_checkpoint_is_named(folder: Path, content: bytes) -> None:
    (folder / STATE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"state\.pt: damaged"):
        loaded(folder / STATE)


def test_a_run_killed_between_the_two_renames_goes_on_from_the_checkpoint_before(folder: Path) -> None:
    (folder / STATE).replace(folder / PREVIOUS)
    state = read_state(folder)
    assert state is not None
    assert state["step"] == 8
