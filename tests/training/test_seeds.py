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
