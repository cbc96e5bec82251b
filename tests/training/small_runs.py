"""A corpus and a recipe that train in a second or two."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvium_core.options import RunOptions
from nvium_core.training.data.texts import END_OF_TEXT
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun, prepare_run

WORDS = [
    *("the", "a", "cat", "dog", "hen", "fox", "ran", "sat", "saw"),
    *("ate", "big", "red", "old", "and", "then", "so", "it"),
]


def small_corpus(path: Path, num_documents: int = 40) -> Path:
    """Write documents of a title and a few dozen words."""
    rng = np.random.default_rng(0)
    odds = 1 / np.arange(1, len(WORDS) + 1)
    documents = []
    for number in range(num_documents):
        words = rng.choice(WORDS, size=rng.integers(20, 60), p=odds / odds.sum())
        documents.append(f"Tale {number}\n\n{' '.join(words)}.")
    path.write_text(f"\n{END_OF_TEXT}\n".join(documents), encoding="utf-8")
    return path


SMALL = [
    "shape.num_layers=2",
    "shape.num_exits=2",
    "shape.width=32",
    "shape.mlp_width=48",
    "shape.vocab_size=280",
    "shape.context=64",
    "tokens_per_step=256",
    "total_tokens=3072",
    "router_warmup.share=0.2",
    "router_warmup.min_steps=0",
    "learning_rate.maximum=0.003",
    "optimizer.muon_rate=0.02",
    "beta.depth=0.45",
]
"""A smaller `tiny` of 12 steps."""

NUM_STEPS = 12


def small_recipe(*settings: str) -> Recipe:
    return recipe_named("tiny", [*SMALL, *settings])


def options(folder: Path, **changes: Any) -> RunOptions:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.parent / "corpus.txt"
    return RunOptions(data=data if data.exists() else small_corpus(data), folder=folder, **changes)


def start(recipe: Recipe, run_options: RunOptions) -> TrainingRun:
    """Start a run as `train` does: resumed if the folder has a checkpoint."""
    run = prepare_run(recipe, run_options)
    run.resume()
    return run


def finished(run: TrainingRun) -> dict[str, torch.Tensor]:
    for _ in run.steps():
        pass
    assert run.step == NUM_STEPS
    return run.model.state_dict()


def advance(run: TrainingRun, num_steps: int) -> None:
    steps = run.steps()
    for _ in range(num_steps):
        next(steps)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
