import json
import sys
from pathlib import Path

import pytest

from nvium_core.errors import TrainingError
from nvium_core.training.loggers import by_name
from tests.training.small_runs import advance, finished, options, small_recipe, start


def test_a_run_resumed_after_step_four_logs_each_step_once_to_tensorboard(tmp_path):
    events_of = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    run_options = options(tmp_path / "run", logger="tensorboard")
    advance(start(small_recipe(), run_options), 6)
    finished(start(small_recipe(), run_options))
    events = events_of(str(run_options.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("mix_loss")] == list(range(1, 13))
    assert {"exit_losses/2", "learning_rate", "gradient_norm", "seconds"} <= {*events.Tags()["scalars"]}
    assert "sample/text_summary" in events.Tags()["tensors"]


def test_weights_and_biases_gets_the_steps_too(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    finished(start(small_recipe(), options(tmp_path / "run", logger="tensorboard,wandb")))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_an_exits_number_has_a_name_of_its_own():
    report = {"step": 3, "mix_loss": 2.5, "exit_probs": [0.25, 0.75], "sample": "A hen."}
    others = {"mix_loss": 2.5, "sample": "A hen."}
    assert by_name(report) == others | {"exit_probs/1": 0.25, "exit_probs/2": 0.75}


@pytest.mark.parametrize(("logger", "complaint"), [("mlflow", "must be one of tensorboard, wandb"), ("wandb", "nvium")])
def test_an_unknown_or_missing_logger_is_refused_before_the_text_is_read(logger, complaint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run_options = options(tmp_path / "run", logger=logger)
    run_options.data.unlink()
    with pytest.raises(TrainingError, match=rf"--logger {logger}: .*{complaint}"):
        start(small_recipe(), run_options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir()
    steps = [
        {"step": step, "mix_loss": 5 / step, "exit_losses": [5.0, 4.0], "exit_probs": [0.3, 0.7], "mean_depth": 0.8}
        for step in (1, 2, 3)
    ]
    steps[-1]["validation_loss"] = 2.0
    (folder / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    return folder


def test_a_figure_has_the_losses_shares_and_depth_of_a_run(nvium, run):
    pytest.importorskip("matplotlib")
    assert str(run / "log.svg") in nvium("plot", run).out.replace("\n", "")
    figure = (run / "log.svg").read_text(encoding="utf-8")
    for text in ("a-run", "loss, nats", "share of", "mean depth", "mixture", "validation", "exit 1", "exit 2"):
        assert f"<!-- {text}" in figure, text


def test_what_cannot_be_drawn_is_refused_by_name(nvium, run, monkeypatch):
    assert "nowhere/log.jsonl: no such log" in nvium.refuses("plot", run / "nowhere")
    assert "run.xyz: " in nvium.refuses("plot", run, "--out", run / "run.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'nvium[research]'" in nvium.refuses("plot", run)
