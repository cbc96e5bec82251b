"""The speed of training, on random tokens."""

import json
from pathlib import Path

import pytest

from nvium_core.bench import training
from nvium_core.training.options import RunOptions
from tests.training.small_runs import small_recipe


def test_tokens_per_second_and_the_share_of_the_peak_follow_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "recipe_named", lambda name, settings: small_recipe())
    monkeypatch.setattr(training, "arithmetic_rate", lambda *_: 1e9)
    options = RunOptions(data=Path("text"), folder=Path("run"), rows_per_pass=128)
    figures = training.measure("small", options, num_steps=2)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["tokens_per_second"] == pytest.approx(128 / figures["step_seconds"])
    share = figures["tokens_per_second"] * figures["flops_per_token"] / 1e9
    assert figures["share_of_peak"] == pytest.approx(share)
    assert not figures["is_compiled"]
