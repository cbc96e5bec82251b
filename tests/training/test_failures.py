import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvium_core.errors import DataError, NviumError, TrainingError
from nvium_core.options import RunOptions
from nvium_core.training.data.source import prepare_text
from nvium_core.training.run_folder import owned
from nvium_core.training.train import show, train
from tests.limits import no_file_larger_than
from tests.training.small_runs import NUM_STEPS, advance, assert_equal, finished, options, small_recipe, start


@pytest.fixture
def run_options(tmp_path: Path) -> RunOptions:
    return options(tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(run_options):
    run = start(small_recipe(), run_options)
    advance(run, 5)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="not finite at step 6"):
        next(run.steps())
    resumed = start(run.recipe, run.options)
    assert resumed.step == 4
    assert all(p.isfinite().all() for p in resumed.model.parameters())
    next(resumed.steps())


def test_a_checkpoint_of_another_format_is_refused(run_options, monkeypatch):
    run = start(small_recipe(), run_options)
    with monkeypatch.context() as later:
        later.setattr("nvium_core.training.run_folder.FORMAT", 0)
        run.save()
    with pytest.raises(TrainingError, match=r"state\.pt: has format 0, but this version of nvium reads format 8"):
        start(small_recipe(), run.options)


def test_only_one_run_at_a_time_can_use_a_folder(run_options):
    with owned(run_options.folder), pytest.raises(TrainingError, match="another run is using it"):
        train(small_recipe(), run_options)
    train(small_recipe("total_tokens=512"), run_options)


def test_a_signal_stops_a_run_after_a_checkpoint_and_the_same_command_resumes(uninterrupted, run_options, capsys):
    run = start(small_recipe(), run_options)
    original = run.update

    def update() -> None:
        original()
        if run.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    run.update = update
    with pytest.raises(KeyboardInterrupt):
        show(run)
    printed = capsys.readouterr().err
    assert f"{run.epochs:.2f} epochs, 12 steps" in printed
    assert "step 1/12 · loss " in printed and "step 2/12" not in printed
    assert "stopped after step 6; run the same command to resume" in printed
    resumed = start(small_recipe(), run.options)
    show(resumed)
    assert "resuming after step 6 of 12" in capsys.readouterr().err
    assert_equal(resumed.model.state_dict(), uninterrupted)


KILLED = """
import os, signal, sys
from pathlib import Path
import tests.conftest  # sets the same number of threads
from tests.training.small_runs import options, small_recipe, start

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

run = start(small_recipe(), options(Path(sys.argv[1])))
steps = run.steps()
for _ in range(5):
    next(steps)
os.fsync = kill
list(steps)
"""


def test_a_run_killed_while_it_writes_a_checkpoint_ends_with_the_weights_of_an_uninterrupted_one(
    uninterrupted, tmp_path
):
    folder = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (folder / "state.partial").exists()
    resumed = start(small_recipe(), options(folder))
    assert resumed.step == 5
    assert_equal(finished(resumed), uninterrupted)


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(uninterrupted, run_options):
    run = start(small_recipe(), run_options)
    advance(run, 5)
    message = r"state\.partial: cannot write the checkpoint"
    with no_file_larger_than(20_000), pytest.raises(TrainingError, match=message):
        list(run.steps())
    resumed = start(run.recipe, run.options)
    assert resumed.step == 4
    assert_equal(finished(resumed), uninterrupted)


def test_an_incomplete_last_line_of_the_log_is_dropped(run_options, tmp_path):
    advance(start(small_recipe(), run_options), 6)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    finished(start(small_recipe(), run_options))
    lines = log.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00v"])
def test_a_damaged_token_file_is_named(run_options, tmp_path, content):
    start(small_recipe(), run_options)
    (tmp_path / "run" / "tokens.npy").write_bytes(content)
    with pytest.raises(TrainingError, match=r"tokens\.npy: damaged"):
        start(small_recipe(), run_options)


STABLE = ["learning_rate.kind=wsd", "learning_rate.decay=0.5", "router_warmup.share=0.1"]


@pytest.mark.parametrize(
    "settings", [["learning_rate.kind=cosine"], ["learning_rate.decay=0.9"], ["router_warmup.share=0.25"]]
)
def test_a_run_cannot_be_extended_if_that_changes_past_steps(run_options, settings):
    advance(start(small_recipe(*STABLE, *settings), run_options), 4)
    with pytest.raises(TrainingError, match=r"total_tokens cannot change after step 4: .* set total_tokens=3072"):
        start(small_recipe(*STABLE, *settings, "total_tokens=6144"), run_options)


def test_a_run_can_be_extended_while_its_rate_is_stable(run_options):
    advance(start(small_recipe(*STABLE), run_options), 4)
    assert start(small_recipe(*STABLE, "total_tokens=6144"), run_options).step == 4


def test_a_text_that_is_too_short_is_refused_and_can_be_replaced(run_options, capsys):
    (short := run_options.data.with_name("short.txt")).write_text("Too short.", encoding="utf-8")
    with pytest.raises(DataError, match=r"short\.txt: 10 bytes of text are too few for a context of 64 .* 256 are"):
        start(small_recipe(), replace(run_options, data=short))
    assert not list(run_options.folder.iterdir()) and not capsys.readouterr().err  # before the tokenizer is trained
    with pytest.raises(DataError, match=r"short\.txt: \d+ tokens of text are too few for a context of 64"):
        start(small_recipe(), replace(run_options, validation=short))
    advance(start(small_recipe(), run_options), 1)


def test_a_missing_initial_model_is_refused_before_the_text_is_read(run_options):
    run_options.data.unlink()
    with pytest.raises(NviumError, match="train `nowhere` first, or pass --set initial=FOLDER"):
        start(small_recipe("initial=runs/nowhere/model"), run_options)


def test_an_error_about_the_kind_of_data_names_a_suitable_recipe(run_options, tmp_path):
    with pytest.raises(DataError, match=r"contains documents, .* use a recipe such as `small`"):
        start(small_recipe("text=conversations"), run_options)
    (chats := tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(DataError, match=r"contains conversations, .* `stories-chat` with --set initial=MODEL"):
        start(small_recipe(), replace(run_options, data=chats))


def test_a_run_does_not_resume_with_tokens_of_other_data(run_options):
    prepare_text(small_recipe(), run_options.data, run_options.folder)
    with pytest.raises(TrainingError, match="vocab_size"):
        prepare_text(small_recipe("shape.vocab_size=290"), run_options.data, run_options.folder)
    run_options.data.write_text("Another text.\n" * 400, encoding="utf-8")
    with pytest.raises(TrainingError, match="tokens were made with another data"):
        prepare_text(small_recipe(), run_options.data, run_options.folder)
    run_options.data.unlink()
    with pytest.raises(DataError, match=run_options.data.name):
        prepare_text(small_recipe(), run_options.data, run_options.folder)
