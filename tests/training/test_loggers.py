import sys

import pytest

from nvium_core.training.errors import TrainingError
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
