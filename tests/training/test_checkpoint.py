"""A checkpoint is used as it was written, by the run that wrote it, or is refused by name."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from nvium_core.training.checkpoint import PREVIOUS, STATE, is_intact, loaded, read_state, write_state
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


def test_one_flipped_bit_anywhere_is_found(folder: Path) -> None:
    content, rng = (folder / STATE).read_bytes(), random.Random(0)
    for _ in range(40):
        damaged, place = bytearray(content), rng.randrange(len(content))
        damaged[place] ^= 1 << rng.randrange(8)
        (folder / STATE).write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"state\.pt: damaged \(its digest"):
            read_state(folder)


@pytest.mark.parametrize("lost", [1, 40, 5000])
def test_a_truncated_checkpoint_is_found(folder: Path, lost: int) -> None:
    (folder / STATE).write_bytes((folder / STATE).read_bytes()[:-lost])
    assert not is_intact(folder / STATE)


def test_a_damaged_checkpoint_offers_the_one_before_which_ends_with_the_same_weights(
    uninterrupted: dict[str, torch.Tensor], stopped: RunOptions, folder: Path
) -> None:
    (folder / STATE).write_bytes(b"damaged")
    with pytest.raises(TrainingError, match=r"of step 4, is intact: `mv \S*state\.previous\.pt \S*state\.pt`"):
        start(small_recipe(), resumed(stopped, folder))
    (folder / PREVIOUS).replace(folder / STATE)
    assert_equal(finished(start(small_recipe(), resumed(stopped, folder))), uninterrupted)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02}u.", b"\x80\x02X\x01\x00\x00\x00\x99."])
def test_a_file_that_is_as_it_was_written_and_yet_no_checkpoint_is_named(folder: Path, content: bytes) -> None:
    (folder / STATE).write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(TrainingError, match=r"state\.pt: damaged"):
        loaded(folder / STATE)


def test_where_both_are_damaged_nothing_is_offered(folder: Path) -> None:
    for name in (STATE, PREVIOUS):
        (folder / name).write_bytes(b"damaged")
    with pytest.raises(TrainingError, match=r"there is no other: delete \S*state\.pt to begin again"):
        read_state(folder)


def test_a_run_killed_between_the_two_renames_goes_on_from_the_checkpoint_before(folder: Path) -> None:
    (folder / STATE).replace(folder / PREVIOUS)
    state = read_state(folder)
    assert state is not None
    assert state["step"] == 8


def test_a_checkpoint_that_reads_back_otherwise_does_not_replace_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, before = loaded(folder / STATE), (folder / STATE).read_bytes()
    monkeypatch.setattr("nvium_core.training.checkpoint.is_intact", lambda path: False)
    with pytest.raises(TrainingError, match="not what was written"):
        write_state(state, folder)
    assert (folder / STATE).read_bytes() == before
    assert not (folder / "state.partial").exists()


@pytest.mark.parametrize("part", ["model", "optimizers"])
@pytest.mark.parametrize("damage", ["missing", "misshapen", "additional"])
def test_tensors_other_than_the_runs_are_named(stopped: RunOptions, folder: Path, part: str, damage: str) -> None:
    state, name = loaded(folder / STATE), "lm_head.weight"
    tensors, key = (state["model"], name) if part == "model" else (state["optimizers"]["state"][name], "exp_avg")
    if damage == "additional":
        key = "unknown"
        tensors[key] = torch.zeros(2)
    elif damage == "missing":
        del tensors[key]
    else:
        tensors[key] = tensors[key][:-1].clone()
    write_state(state, folder)
    with pytest.raises(TrainingError, match=rf"other tensors than the run's: {part}\.\S*{key}"):
        start(small_recipe(), resumed(stopped, folder))
