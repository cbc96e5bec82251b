import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nvium_core.training.distributed import Processes, joined_processes
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from nvium_core.training.train import prepare_run, train
from tests.training.small_runs import SMALL, assert_equal, options, small_folder, small_recipe

CHANGES = ["optimizer.muon_rate=0", "learning_rate.maximum=0.001", "total_tokens=1536"]


def train_by_two(run_options: RunOptions, module: str = "nvium_core.cli") -> int:
    """Run `nvium train`, or a module in its place, under torchrun. Return the exit status."""
    settings = [f"--set={setting}" for setting in [*SMALL, *CHANGES]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [f"--data={run_options.data}", f"--validation={run_options.data}", f"--folder={run_options.folder}"]
    command = ["-m", module, "train", "tiny", "--no-compile", *paths, "--rows-per-pass=64", *settings]
    return subprocess.run([*torchrun, *command], check=False, timeout=300).returncode


def weights(run_options: RunOptions) -> dict[str, torch.Tensor]:
    return load_file(run_options.folder / "model" / "model.safetensors")


def figures(run_options: RunOptions) -> list[dict[str, float]]:
    lines = (run_options.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    names = {"step", "mix_loss", "mean_depth", "validation_loss"}
    return [{name: value for name, value in json.loads(line).items() if name in names} for line in lines]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """The options of a run of two processes, on a corpus of three files."""
    folder = tmp_path_factory.mktemp("together")
    run_options = replace(options(folder / "run"), data=small_folder(folder / "corpus"))
    assert train_by_two(run_options) == 0
    return run_options


def test_two_processes_train_what_one_does(together, tmp_path):
    alone = replace(options(tmp_path / "alone"), data=together.data, validation=together.data)
    expected = load_file(train(small_recipe(*CHANGES), alone) / "model.safetensors")
    found = weights(together)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=0.02, atol=2e-3, msg=name)
    for ours, theirs in zip(figures(together), figures(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(("received", "step"), [(signal.SIGKILL, 4), (signal.SIGTERM, 5)])
def test_two_processes_that_are_stopped_and_restarted_end_with_the_same_weights(
    received, step, together, tmp_path, monkeypatch
):
    monkeypatch.setenv("SIGNAL", str(int(received)))
    resumed = replace(options(tmp_path / "run"), data=together.data)
    assert train_by_two(resumed, "tests.training.killed_run") != 0
    assert torch.load(resumed.folder / "state.pt")["step"] == step
    assert not (resumed.folder / "model").exists()
    assert train_by_two(resumed) == 0
    assert_equal(weights(resumed), weights(together))


def test_windows_must_divide_evenly_among_processes(tmp_path):
    with pytest.raises(TrainingError, match=r"tokens_per_step: 4 windows .* 3 processes"):
        prepare_run(small_recipe(), options(tmp_path / "run"), Processes(0, 3))


def test_each_process_selects_the_gpu_of_its_local_rank_before_it_joins(tmp_path, monkeypatch):
    """There is no GPU 3, and gloo replaces NCCL."""
    done, begin = list[Any](), dist.init_process_group
    store = dist.FileStore(str(tmp_path / "store"), 1)

    def by_gloo(backend: str, *, device_id: torch.device, **_: Any) -> None:
        done.append((backend, device_id))
        begin("gloo", store=store, rank=0, world_size=1)

    monkeypatch.setattr(dist, "init_process_group", by_gloo)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with joined_processes("cuda") as processes:
        processes.wait()
    device = torch.device("cuda", 3)
    assert done == [device, ("nccl", device)]
