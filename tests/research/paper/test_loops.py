import json

import pytest

from research.paper import loops
from tests.training.small_runs import small_corpus

CHANGES = ["shape.width=32", "shape.mlp_width=48", "shape.num_heads=2", "shape.vocab_size=280", "shape.context=64"]
CHANGES += ["tokens_per_step=256", "total_tokens=512"]


def test_models_of_a_seed_are_trained_evaluated_and_timed_in_turns(tmp_path, monkeypatch):
    data, file = small_corpus(tmp_path / "corpus.txt"), tmp_path / "loops.json"
    monkeypatch.setattr(loops, "KINDS", {kind: loops.KINDS[kind] for kind in ("looped", "dense-16")})
    monkeypatch.setattr(loops, "TOKENS", 8)
    monkeypatch.setattr(loops, "REPEATS", 1)
    asked = [f"--data={data}", f"--validation={data}", f"--json={file}", f"--folder={tmp_path / 'runs'}", "--seeds=1"]
    loops.main(asked + [f"--set={change}" for change in CHANGES])
    figures = json.loads(file.read_text())
    ours, dense = figures["runs"]
    assert [run["num_layers"] * run["num_loops"] for run in (ours, dense)] == [16, 16]
    assert (ours["exit_layers"], dense["exit_layers"]) == ([4, 8, 12, 16], [16])
    assert ours["perplexity_gain_percent"] == pytest.approx(100 * (1 - ours["perplexity"] / dense["perplexity"]))
    assert [row["sequences"] for row in figures["rows"]] == [1, 4, 8]
    assert all(row["models"]["dense-16"]["over_dense-16"] == 1 for row in figures["rows"])
    looped, untied = figures["memory"]["looped"], figures["memory"]["dense-16"]
    assert looped["weight_bytes"] < untied["weight_bytes"] < untied["peak_bytes"]
    assert untied["cache_bytes_per_token"] < looped["cache_bytes_per_token"]  # which has states of each exit
