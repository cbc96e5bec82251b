import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nvium_core import NviumConfig, NviumForCausalLM
from nvium_core.training.data.texts import assistant, user
from nvium_core.training.train import TrainingRun, train
from tests.training.small_runs import (
    NUM_STEPS,
    SMALL,
    WORDS,
    advance,
    assert_equal,
    finished,
    options,
    small_corpus,
    small_recipe,
    start,
)
from tests.training.test_objective import outcome_of


def test_a_run_learns_and_leaves_a_model_that_loads(tmp_path):
    run_options = options(tmp_path / "run")
    folder = train(small_recipe("total_tokens=15360", "learning_rate.maximum=0.01"), run_options)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [report["step"] for report in log] == list(range(1, 61))
    assert log[-1]["mix_loss"] < log[0]["mix_loss"] - 1
    assert [len(report["exit_losses"]) for report in log] == [2] * 60
    assert all(report["gradient_norm"] > 0 for report in log)
    assert [report["step"] for report in log if report.get("sample")] == list(range(4, 61, 4))
    assert 0 < log[0]["seconds"] <= log[-1]["seconds"]
    penalties = [report["beta"] * report["mean_depth"] for report in log]
    assert [each["loss"] - each["mix_loss"] for each in log[20:]] == pytest.approx(penalties[20:], abs=1e-4)
    assert max(report["learning_rate"] for report in log) == pytest.approx(0.01, rel=0.05)
    assert log[-1]["learning_rate"] == pytest.approx(0.001)
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044
    model, tokenizer = NviumForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 9, 12]), (100, [3, 4, 7, 8, 11, 12])])
def test_checkpoints_are_due_by_share_of_the_run_by_steps_and_by_the_clock(every, expected, tmp_path):
    run, due = start(small_recipe(f"checkpoint_every={every}"), options(tmp_path / "run")), []
    for run.step in range(1, NUM_STEPS + 1):
        run.seconds += 100
        if run.is_checkpoint_due:
            due.append(run.step)
            run.saved = run.seconds
    assert due == expected


def test_the_clock_goes_on_in_a_resumed_run(tmp_path):
    run = start(small_recipe(), options(tmp_path / "run"))
    run.seconds = 1000.0
    advance(run, 4)
    assert next(start(small_recipe(), run.options).steps())["seconds"] > 1000


def test_a_sample_does_not_change_the_random_numbers_of_the_run(tmp_path):
    run, before = start(small_recipe(), options(tmp_path / "run")), torch.get_rng_state()
    assert isinstance(run.sample(), str)
    assert torch.equal(torch.get_rng_state(), before) and run.model.training


def test_a_run_says_that_it_tokenizes(tmp_path, capsys):
    start(small_recipe("total_tokens=1024"), options(tmp_path / "run"))
    printed = capsys.readouterr().err
    assert "training a tokenizer of 280 tokens" in printed and "corpus.txt, up to 1,025 tokens" in printed


@pytest.mark.parametrize("interrupted_after", [1, 4, 6, 9, 11])
def test_an_interrupted_run_ends_with_exactly_the_weights_of_an_uninterrupted_one(
    interrupted_after, uninterrupted, tmp_path
):
    run_options = options(tmp_path / "run")
    advance(start(small_recipe(), run_options), interrupted_after)
    torch.manual_seed(99)
    resumed = start(small_recipe(), run_options)
    assert resumed.step == interrupted_after // 4 * 4
    assert_equal(finished(resumed), uninterrupted)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # from PyTorch's compiler
def test_a_compiled_run_has_the_losses_of_an_eager_one(tmp_path):
    recipe = small_recipe("total_tokens=768")
    eager, compiled = (
        [report["mix_loss"] for report in start(recipe, options(tmp_path / str(how), compile=how)).steps()]
        for how in (False, True)
    )
    assert compiled == pytest.approx(eager, abs=0.02)


def first_moments(folder: Path, **changes: Any) -> torch.Tensor:
    """Return Adam's first moments after one step, which are the gradient up to a factor."""
    run = start(small_recipe(), options(folder, **changes))
    run.train_step(run.batches_of(0))
    return torch.cat([state["exp_avg"].flatten() for state in run.optimizers[-1].state.values()])


def test_the_size_of_a_pass_changes_only_rounding(tmp_path):
    whole = first_moments(tmp_path / "whole", rows_per_pass=8 * 32)
    parts = first_moments(tmp_path / "parts", rows_per_pass=7 * 32)
    assert (whole - parts).norm() < 0.02 * whole.norm()


def test_a_validation_text_is_evaluated_at_the_scheduled_steps(tmp_path):
    text = small_corpus(tmp_path / "validation.txt", num_documents=7)
    run = start(small_recipe("evaluations=2"), options(tmp_path / "run", validation=text))
    evaluations = {report["step"]: report for report in run.steps() if "validation_loss" in report}
    assert list(evaluations) == [6, 12]
    windows = [run.validation.batch(number, 1) for number in range(run.validation.num_windows)]
    with torch.no_grad(), run.autocast():
        losses = [float(outcome_of(run.model, window).loss) for window in windows]
    assert evaluations[12]["validation_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_an_evaluation_weights_windows_by_their_counted_targets(tmp_path):
    """The second window has nine times as many as the first."""
    run = start(small_recipe(), options(tmp_path / "run"))
    batches = [run.stream.batch(number, 1) for number in range(2)]
    for batch, num_counted in zip(batches, (6, 54), strict=True):
        batch.counted[:, num_counted:] = False
    windows = SimpleNamespace(num_windows=2, batch=lambda first, *_: batches[first])
    found = run.evaluate(windows)["validation_loss"]
    with torch.no_grad():
        losses = [float(outcome_of(run.model, batch).loss) for batch in batches]
    assert found == pytest.approx((losses[0] + 9 * losses[1]) / 10, abs=1e-4)
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize(
    ("evaluations", "steps"), [(0, []), (1, [12]), (5, [3, 5, 8, 10, 12]), (50, list(range(1, 13)))]
)
def test_evaluations_are_evenly_spaced_and_the_last_is_at_the_end(evaluations, steps, tmp_path):
    run = start(small_recipe(f"evaluations={evaluations}"), options(tmp_path / "run"))
    due = []
    for run.step in range(1, NUM_STEPS + 1):
        due += [run.step] if run.is_evaluation_due else []
    assert due == steps


def test_beta_acts_after_the_router_warm_up(tmp_path):
    reports = list(start(small_recipe(), options(tmp_path / "run")).steps())
    assert [report["beta"] > 0 for report in reports] == [False] * 3 + [True] * 9


def test_a_trained_model_can_be_fine_tuned_on_conversations(tmp_path):
    base = train(small_recipe("shape.context=256", "shape.vocab_size=320"), options(tmp_path / "base"))
    tuning = ("shape.context=256", "shape.vocab_size=320", "text=conversations", f"initial={base}")
    chats = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [user(f"{word}?"), assistant(f"the {word} {other}")]} for word in WORDS for other in WORDS[:5]
    ]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run_options = replace(options(tmp_path / "chat", validation=chats), data=chats)
    run = start(small_recipe(*tuning, "evaluations=2", "tokens_per_step=1024", "total_tokens=12288"), run_options)
    initial = NviumForCausalLM.from_pretrained(base).parameters()
    assert all(
        torch.equal(ours.bfloat16(), theirs) for ours, theirs in zip(run.model.parameters(), initial, strict=True)
    )
    assert 0 < run.batches_of(0)[0].counted.float().mean() < 0.95
    evaluations = [report["validation_loss"] for report in run.steps() if "validation_loss" in report]
    assert evaluations[-1] < evaluations[0]
    tuned, original = AutoTokenizer.from_pretrained(run.export()), AutoTokenizer.from_pretrained(base)
    assert "Assistant:" in tuned.chat_template and tuned.get_vocab() == original.get_vocab()


@pytest.mark.parametrize(("total_tokens", "warns"), [("3072", True), ("1e9", False)])
def test_less_than_one_token_per_parameter_is_a_warning(tmp_path, total_tokens, warns):
    line = start(small_recipe(f"total_tokens={total_tokens}"), options(tmp_path / "run")).tokens_summary()
    assert "per parameter" in line and ("Warning" in line) == warns


def test_a_model_knows_the_tokens_of_its_run_and_of_its_initial_models(tmp_path):
    first = train(small_recipe("total_tokens=512"), options(tmp_path / "first"))
    tuned = train(small_recipe("total_tokens=256", f"initial={first}"), options(tmp_path / "tuned"))
    assert [NviumConfig.from_pretrained(folder).training_tokens for folder in (first, tuned)] == [512, 768]


RECIPE = small_recipe("total_tokens=25600")  # 100 steps, of which 20 warm up


def warnings_at(shares: list[list[float]], first_step: int) -> list[int]:
    run = SimpleNamespace(recipe=RECIPE, num_collapsed=0)
    reports = ({"step": step, "exit_probs": each} for step, each in enumerate(shares, first_step))
    return [report["step"] for report in reports if TrainingRun.advice(run, report)]


COLLAPSED, BALANCED = [0.99, 0.01], [0.9, 0.1]


def test_ten_steps_with_nearly_all_tokens_at_one_exit_are_one_warning():
    assert warnings_at([COLLAPSED] * 30, first_step=40) == [49]
    assert warnings_at([*[COLLAPSED] * 9, BALANCED] * 3, first_step=40) == []
    assert warnings_at([*[COLLAPSED] * 12, BALANCED, *[COLLAPSED] * 12], first_step=40) == [49, 62]
    assert warnings_at([[1.0]] * 30, first_step=40) == []


def test_the_router_warm_up_does_not_count():
    assert warnings_at([COLLAPSED] * 30, first_step=1) == [29]


@pytest.mark.parametrize(("shares", "change"), [([0.99, 0.01], "lower β"), ([0.01, 0.99], "raise β")])
def test_the_warning_names_the_settings_to_change(shares, change):
    run = SimpleNamespace(recipe=RECIPE, num_collapsed=9)
    line = TrainingRun.advice(run, {"step": 50, "exit_probs": shares})
    assert f"{change} (beta.initial=0.002)" in line and "router_warmup.share=0.2" in line


def test_several_seeds_give_one_table_of_their_figures_with_mean_and_spread(nvium, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    text = small_corpus(tmp_path / "text.txt")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    folder, files = tmp_path / "runs", ("--data", text, "--validation", text)
    shown = nvium("train", "tiny", *files, "--folder", folder, "--seeds", "3,5", "--no-compile", *settings).out
    reports = [json.loads((folder / f"seed-{seed}" / "log.jsonl").read_text().splitlines()[-1]) for seed in (3, 5)]
    losses = [report["validation_loss"] for report in reports]
    assert losses[0] != losses[1]
    assert f"{fmean(losses):.4f} ± {stdev(losses):.4f}" in shown
    assert all(f"{loss:.4f}" in shown for loss in losses) and "mean depth" in shown
    assert "Warning: seed-5 has read" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("seeds", "complaint"),
    [
        ("1,x", "--seeds: must be integers such as 1,2,3"),
        (",", "--seeds: must be integers such as 1,2,3"),
        ("1,1", "--seeds: must be different"),
        ("1,-1", "seed must not be negative"),
        (f"1,{2**63}", "seed must be below 2⁶³"),
    ],
)
def test_wrong_seeds_are_refused_before_the_first_run(nvium, seeds, complaint, tmp_path):
    assert complaint in nvium.refuses("train", "tiny", "--data", tmp_path, "--seeds", seeds)
