"""A run is resumed with the recipe, text and circumstances it was begun with, or told by name what is other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvium_core.training.checkpoint import STATE, loaded, write_state
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from tests.training.small_runs import advance, options, small_corpus, small_recipe, start


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """A run stopped after its checkpoint of step 4."""
    run_options = options(tmp_path_factory.mktemp("stopped") / "run")
    advance(start(small_recipe(), run_options), 5)
    return run_options


def changed(folder: Path, part: str, **values: Any) -> None:
    """Rewrite the checkpoint; None removes a value."""
    state = loaded(folder / STATE)
    state[part] |= values
    state[part] = {name: value for name, value in state[part].items() if value is not None}
    write_state(state, folder)


@pytest.mark.parametrize(("name", "begun"), [("rows_per_pass", "16384"), ("sharding", "ddp")])
def test_a_run_is_not_resumed_with_other_options_unless_that_is_accepted(
    stopped: RunOptions, folder: Path, name: str, begun: str
) -> None:
    other: dict[str, Any] = {name: {"rows_per_pass": 64, "sharding": "fsdp"}[name]}
    resumed = replace(stopped, folder=folder, **other)
    with pytest.raises(TrainingError, match=rf"begun with other {name} \({begun}\).*--accept-changes"):
        start(small_recipe(), resumed)
    assert start(small_recipe(), replace(resumed, accept_changes=True)).step == 4


def test_a_run_is_not_resumed_with_another_validation_text(stopped: RunOptions, folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"begun with other validation \(None\)"):
        start(small_recipe(), replace(stopped, folder=folder, validation=stopped.data))


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "NVIDIA H100"), ("precision", "torch.float16"), ("threads", 96), ("torch", "2.9"), ("processes", 4)],
)
def test_what_the_machine_and_the_libraries_were_is_recorded_and_named(
    stopped: RunOptions, folder: Path, name: str, value: object
) -> None:
    changed(folder, "run", **{name: value})
    resumed = replace(stopped, folder=folder)
    with pytest.raises(TrainingError, match=rf"begun with other {name} \({value}\).*--accept-changes"):
        start(small_recipe(), resumed)
    assert start(small_recipe(), replace(resumed, accept_changes=True)).step == 4


def test_a_checkpoint_that_did_not_record_something_says_so(stopped: RunOptions, folder: Path) -> None:
    changed(folder, "run", torch=None)
    with pytest.raises(TrainingError, match=r"begun with other torch \(not recorded\)"):
        start(small_recipe(), replace(stopped, folder=folder))


def test_a_run_is_not_resumed_on_another_text(stopped: RunOptions, folder: Path, tmp_path: Path) -> None:
    other = small_corpus(tmp_path / "other.txt", num_documents=41)
    with pytest.raises(TrainingError, match="holds tokens of other data"):
        start(small_recipe(), replace(stopped, folder=folder, data=other))


@pytest.mark.parametrize("setting", ["optimizer.weight_decay=0.2", "answers_only=false", "beta.initial=0.5"])
def test_a_run_is_not_resumed_with_another_recipe(stopped: RunOptions, folder: Path, setting: str) -> None:
    with pytest.raises(TrainingError, match=f"holds a run with other {setting.partition('=')[0]}; choose another"):
        start(small_recipe(setting), replace(stopped, folder=folder))


def test_a_setting_that_came_after_the_checkpoint_was_what_is_now_its_default(
    stopped: RunOptions, folder: Path
) -> None:
    optimizer = loaded(folder / STATE)["recipe"]["optimizer"]
    del optimizer["betas"]
    changed(folder, "recipe", answers_only=None, layerskip=None, optimizer=optimizer)
    resumed = replace(stopped, folder=folder)
    assert start(small_recipe(), resumed).step == 4
    with pytest.raises(TrainingError, match=r"other answers_only, optimizer\.betas;"):
        start(small_recipe("answers_only=false", "optimizer.betas=0.9,0.99"), resumed)


def test_the_number_of_threads_matters_on_a_cpu(stopped: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(small_recipe(), stopped)
    assert run.circumstances["threads"] == torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(TrainingError, match="begun with other threads"):
        start(small_recipe(), stopped)
