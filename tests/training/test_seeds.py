import json
from statistics import fmean, stdev

import pytest

from tests.training.small_runs import SMALL, small_corpus


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


@pytest.mark.parametrize("seeds", ["1,x", ","])
def test_seeds_that_are_not_integers_are_refused(nvium, seeds, tmp_path):
    assert "must be integers such as 1,2,3" in nvium.refuses("train", "tiny", "--data", tmp_path, "--seeds", seeds)
