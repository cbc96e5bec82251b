import json
from pathlib import Path

import pytest

from nvium_core.options import RunOptions
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import train
from research.paper import vocabulary
from tests.training.small_runs import small_corpus

CHANGES = ["shape.num_layers=2", "shape.exit_layers=1,2", "shape.num_exits=2", "shape.width=32", "shape.mlp_width=48"]
CHANGES += ["shape.num_heads=2", "shape.context=64", "tokens_per_step=256"]


def test_a_run_and_its_twin_are_trained_and_evaluated_once(tmp_path, monkeypatch):
    data, file = small_corpus(tmp_path / "corpus.txt"), tmp_path / "vocabulary.json"
    asked = [f"--data={data}", f"--validation={data}", f"--json={file}", f"--folder={tmp_path / 'runs'}"]
    asked += ["--seeds=0", "--tokens=512", "--sizes", "270", "280", *(f"--set={change}" for change in CHANGES)]
    begun = list[Recipe]()

    def counted(recipe: Recipe, options: RunOptions) -> Path:
        begun.append(recipe)
        return train(recipe, options)

    monkeypatch.setattr(vocabulary, "train", counted)
    vocabulary.main(asked)
    assert len(begun) == 4
    small, large = json.loads(file.read_text())
    assert [(each["vocab_size"], each["seed"]) for each in (small, large)] == [(270, 0), (280, 0)]
    assert small["width_over_vocabulary"] == 32 / 270
    assert small["twin"]["exit_layers"] == [2]
    assert [caveat.partition(" has read")[0] for caveat in small["caveats"]] == [small["model"], small["twin"]["model"]]
    gain = 100 * (1 - small["perplexity"] / small["twin"]["perplexity"])
    low, high = small["perplexity_gain_interval_percent"]
    assert small["perplexity_gain_percent"] == pytest.approx(gain) and low <= gain <= high
    file.write_text(json.dumps([small]))
    vocabulary.main(asked)
    assert len(begun) == 4 and json.loads(file.read_text()) == [small, large]
