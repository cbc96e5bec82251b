import json
import sys
from pathlib import Path

import pytest


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
