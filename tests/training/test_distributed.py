"""Two processes on the CPU, started as a user would, train what one process trains."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nvium_core.training.distributed import Processes, spread
from nvium_core.training.errors import TrainingError
from nvium_core.training.train import RunOptions, TrainingRun, prepared, train
from tests.training.small_runs import SMALL, options, small_recipe

CHANGES = ["optimizer.muon_rate=0", "learning_rate.maximum=0.001", "total_tokens=1536", "checkpoint_every=2"]


def train_by_two(run_options: RunOptions, *more: str) -> None:
    settings = [f"--set={setting}" for setting in [*SMALL, *CHANGES]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [f"--data={run_options.data}", f"--folder={run_options.folder}"]
    command = [*torchrun, "-m", "nvium_core.cli", "train", "tiny", "--no-compile", *paths, *more, *settings]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_train_what_one_does(sharding: str, tmp_path: Path) -> None:
    alone, together = options(tmp_path / "alone"), options(tmp_path / "together")
    expected = load_file(train(small_recipe(*CHANGES), alone) / "model.safetensors")
    train_by_two(together, f"--sharding={sharding}", "--rows-per-pass=64")
    found = load_file(together.folder / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=0.02, atol=2e-3, msg=name)
    assert len((together.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_a_process_alone_takes_all_windows_and_one_of_two_takes_half() -> None:
    assert Processes().share(6) == range(6)
    assert [Processes(rank, 2).share(6) for rank in (0, 1)] == [range(3), range(3, 6)]


def test_windows_that_cannot_be_shared_equally_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"tokens_per_step: 8 windows .* 3 processes"):
        started(tmp_path, Processes(0, 3))


def test_muon_and_sharded_matrices_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Muon needs whole matrices"):
        started(tmp_path, Processes(0, 2), "optimizer.muon_rate=0.02", sharding="fsdp")


def started(folder: Path, processes: Processes, *settings: str, **changes: str) -> TrainingRun:
    alone = options(folder / "run", **changes)
    prepared(small_recipe(), alone, torch.device("cpu"), Processes())
    return TrainingRun(small_recipe(*settings), alone, *(None, None), processes=processes)  # type: ignore[arg-type]


def test_one_process_needs_no_wrapping() -> None:
    module = torch.nn.Linear(2, 2)
    assert spread(module, torch.nn.ModuleList(), "fsdp", Processes()) is module
