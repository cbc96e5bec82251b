"""Whole runs, a second or two each: they learn, they resume exactly, and they fail without harm."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from nvium_core import NviumForCausalLM
from nvium_core.training.data import DataError
from nvium_core.training.train import TrainingError, TrainingRun, prepare_text, train
from tests.training.small_runs import options, small_recipe, start

NUM_STEPS = 12


def finished(run: TrainingRun) -> dict[str, torch.Tensor]:
    for _ in run.steps():
        pass
    assert run.step == NUM_STEPS
    return run.model.state_dict()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return finished(start(small_recipe(), options(tmp_path_factory.mktemp("whole") / "run")))


def advance(run: TrainingRun, num_steps: int) -> None:
    steps = run.steps()
    for _ in range(num_steps):
        next(steps)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_run_learns_and_leaves_a_model_that_loads(tmp_path: Path) -> None:
    run_options = options(tmp_path / "run")
    folder = train(small_recipe("total_tokens=15360", "learning_rate.maximum=0.01"), run_options)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [report["step"] for report in log] == list(range(1, 61))
    assert log[-1]["mix_loss"] < log[0]["mix_loss"] - 1
    model, tokenizer = NviumForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("interrupted_after", [1, 4, 6, 9, 11])
def test_an_interrupted_run_ends_with_exactly_the_weights_of_an_uninterrupted_one(
    interrupted_after: int, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_options = options(tmp_path / "run")
    advance(start(small_recipe(), run_options), interrupted_after)
    torch.manual_seed(99)
    resumed = start(small_recipe(), run_options)
    assert resumed.step == interrupted_after // 4 * 4
    assert_equal(finished(resumed), uninterrupted)


def test_the_log_of_a_resumed_run_names_every_step_once(tmp_path: Path) -> None:
    run_options = options(tmp_path / "run")
    advance(start(small_recipe(), run_options), 6)
    finished(start(small_recipe(), run_options))
    lines = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, NUM_STEPS + 1))


def test_a_finished_run_is_left_as_it_is(uninterrupted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run_options = options(tmp_path / "run")
    finished(start(small_recipe(), run_options))
    assert_equal(finished(start(small_recipe(), run_options)), uninterrupted)


def first_moments(folder: Path, rows_per_pass: int) -> torch.Tensor:
    """Adam's first moments after one step: its gradient, up to a factor."""
    run = start(small_recipe(), options(folder, rows_per_pass=rows_per_pass))
    run.train_step()
    return torch.cat([state["exp_avg"].flatten() for state in run.optimizers[-1].state.values()])


def test_the_size_of_a_pass_changes_nothing_but_rounding(tmp_path: Path) -> None:
    whole = first_moments(tmp_path / "whole", rows_per_pass=8 * 32)
    parts = first_moments(tmp_path / "parts", rows_per_pass=7 * 32)
    assert (whole - parts).norm() < 0.02 * whole.norm()


def test_routers_are_balanced_first_and_priced_afterwards(tmp_path: Path) -> None:
    reports = list(start(small_recipe(), options(tmp_path / "run")).steps())
    assert [report["beta"] > 0 for report in reports] == [False] * 3 + [True] * 9


@pytest.fixture
def broken(tmp_path: Path) -> TrainingRun:
    """A run that has made a checkpoint at step 4 and then lost its mind."""
    run = start(small_recipe(), options(tmp_path / "run"))
    advance(run, 5)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = torch.nan
    return run


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(broken: TrainingRun) -> None:
    with pytest.raises(TrainingError, match="not finite at step 6"):
        next(broken.steps())
    resumed = start(broken.recipe, broken.options)
    assert resumed.step == 4
    assert all(p.isfinite().all() for p in resumed.model.parameters())
    next(resumed.steps())


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_spares_the_last(tmp_path: Path) -> None:
    run = start(small_recipe(), options(tmp_path / "run"))
    steps = run.steps()
    for _ in range(5):
        next(steps)
    (tmp_path / "run" / "state.partial").mkdir()
    with pytest.raises(TrainingError, match=r"state\.partial: cannot write the checkpoint"):
        list(steps)
    assert start(run.recipe, run.options).step == 4


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    run_options = options(tmp_path / "run")
    (tmp_path / "file").touch()
    blocked = type(run_options)(data=run_options.data, folder=tmp_path / "file" / "run")
    with pytest.raises(TrainingError, match=r"file/run"):
        train(small_recipe(), blocked)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 truncated", b"not a checkpoint"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    run_options = options(tmp_path / "run")
    (tmp_path / "run" / "state.pt").write_bytes(content)
    with pytest.raises(TrainingError, match=r"state\.pt"):
        start(small_recipe(), run_options)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00v"])
def test_damaged_tokens_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    run_options = options(tmp_path / "run")
    start(small_recipe(), run_options)
    (tmp_path / "run" / "tokens.npy").write_bytes(content)
    with pytest.raises(TrainingError, match=r"tokens\.npy"):
        start(small_recipe(), run_options)


@pytest.mark.parametrize("key", ["shape.width", "short_context", "tokens_per_step", "seed"])
def test_a_run_is_resumed_only_by_the_recipe_that_began_it(tmp_path: Path, key: str) -> None:
    run_options = options(tmp_path / "run")
    advance(start(small_recipe(), run_options), 4)
    with pytest.raises(TrainingError, match=rf" {key}"):
        start(small_recipe(f"{key}=128"), run_options)


def test_a_run_does_not_go_on_with_tokens_of_something_else(tmp_path: Path) -> None:
    run_options = options(tmp_path / "run")
    prepare_text(small_recipe(), run_options)
    with pytest.raises(TrainingError, match="seed"):
        prepare_text(small_recipe("seed=9"), run_options)
    run_options.data.write_text("Another text.\n" * 400, encoding="utf-8")
    with pytest.raises(TrainingError, match="data"):
        prepare_text(small_recipe(), run_options)
    run_options.data.unlink()
    with pytest.raises(DataError, match=run_options.data.name):
        prepare_text(small_recipe(), run_options)
