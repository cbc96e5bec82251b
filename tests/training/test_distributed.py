import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nvium_core.training.distributed import Processes, joined_processes, own_device
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from nvium_core.training.train import prepared, train
from tests.training.small_runs import SMALL, assert_equal, options, small_folder, small_recipe

CHANGES = ["optimizer.muon_rate=0", "learning_rate.maximum=0.001", "total_tokens=1536", "checkpoint_every=2"]


def train_by_two(run_options: RunOptions, sharding: str, module: str = "nvium_core.cli") -> int:
    """Run `nvium train`, or a module in its place, under torchrun. Return the exit status."""
    settings = [f"--set={setting}" for setting in [*SMALL, *CHANGES]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [f"--data={run_options.data}", f"--folder={run_options.folder}"]
    passes = [f"--sharding={sharding}", "--rows-per-pass=64"]
    command = ["-m", module, "train", "tiny", "--no-compile", *paths, *passes, *settings]
    return subprocess.run([*torchrun, *command], check=False, timeout=300).returncode


def weights(run_options: RunOptions) -> dict[str, torch.Tensor]:
    return load_file(run_options.folder / "model" / "model.safetensors")


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunOptions]:
    """The sharding of two processes, and the options of their run. With DDP they read a corpus of three files."""
    folder = tmp_path_factory.mktemp(request.param)
    run_options = options(folder / "together")
    if request.param == "ddp":
        run_options = replace(run_options, data=small_folder(folder / "corpus"))
    assert train_by_two(run_options, request.param) == 0
    return request.param, run_options


def test_two_processes_train_what_one_does(together, tmp_path):
    alone = replace(options(tmp_path / "alone"), data=together[1].data)
    expected = load_file(train(small_recipe(*CHANGES), alone) / "model.safetensors")
    found = weights(together[1])
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=0.02, atol=2e-3, msg=name)
    assert len((together[1].folder / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_two_processes_that_are_killed_and_restarted_end_with_the_same_weights(together, tmp_path):
    (sharding, whole), resumed = together, replace(options(tmp_path / "run"), data=together[1].data)
    assert train_by_two(resumed, sharding, "tests.training.killed_run") != 0
    assert torch.load(resumed.folder / "state.pt")["step"] == 4
    assert not (resumed.folder / "model").exists()
    assert train_by_two(resumed, sharding) == 0
    assert_equal(weights(resumed), weights(whole))


def test_windows_must_divide_evenly_among_processes(tmp_path):
    with pytest.raises(TrainingError, match=r"tokens_per_step: 4 windows .* 3 processes"):
        prepared(small_recipe(), options(tmp_path / "run"), torch.device("cpu"), Processes(0, 3))


def test_muon_does_not_support_fsdp(tmp_path):
    recipe, sharded = small_recipe("optimizer.muon_rate=0.02"), options(tmp_path / "run", sharding="fsdp")
    with pytest.raises(TrainingError, match="Muon does not support FSDP"):
        prepared(recipe, sharded, torch.device("cpu"), Processes(0, 2))


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
    device = own_device(torch.device("cuda"))
    with joined_processes(device) as processes:
        assert processes.device == device == torch.device("cuda", 3)
        processes.wait()
    assert done == [device, ("nccl", device)]
