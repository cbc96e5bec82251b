"""When do exits pay? The gain of `small` over its dense twin by vocabulary size, at β 0, over seeds.

    python -m nvium_core.evaluation.vocabulary --data train.txt.xz --validation valid.txt.xz --json vocabulary.json

A mixture of exits adds rank to the output, which a small vocabulary does not need (softmax bottleneck). Runs live in
one folder and continue where they stopped; the JSON has every finished pair, is written after each, and none that it
has is trained again.
"""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from nvium_core.bench.harness import Figures
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.evaluation.suite import beside_twin, description, write_json
from nvium_core.loading import load_model
from nvium_core.training.data.documents import read_documents
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.catalogue import DENSE, recipe_named
from nvium_core.training.train import train

SIZES = (512, 8192, 2048)
"""The extremes first."""

SEEDS = 3
RECIPE = "small"


def settings_of(size: int, seed: int, changes: Sequence[str]) -> list[str]:
    return ["beta.initial=0", f"shape.vocab_size={size}", f"seed={seed}", *changes]


def pair(options: RunOptions, documents: Sequence[str], size: int, seed: int, changes: Sequence[str]) -> Figures:
    """The figures of `nvium evaluate --twin` that matter here."""
    ours, dense = (
        load_model(str(trained(f"{RECIPE}{suffix}", options, size, seed, changes)), "cpu") for suffix in ("", DENSE)
    )
    found = vars(evaluate(ours.model, ours.tokenizer, documents))
    kept = ("num_tokens", "num_characters", "perplexity", "bits_per_character", "exit_shares", "mean_depth")
    return {
        **description(ours),
        "vocab_size": size,
        "width_over_vocabulary": ours.model.config.hidden_size / size,
        "seed": seed,
        **{name: found[name] for name in kept},
        **beside_twin(found, dense, documents, show_progress=False),
    }


def trained(name: str, options: RunOptions, size: int, seed: int, changes: Sequence[str]) -> Path:
    """The model's folder, trained now unless it exists."""
    folder = options.folder / f"{name}-{size}-seed-{seed}"
    if (model := folder / "model").is_dir():
        return model
    return train(recipe_named(name, settings_of(size, seed, changes)), replace(options, folder=folder))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m nvium_core.evaluation.vocabulary", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/vocabulary"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as of nvium train")
    given = parser.parse_args(arguments)
    done: list[Figures] = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else []
    has = {(figures["seed"], figures["vocab_size"]) for figures in done}
    options, documents = RunOptions(data=given.data, folder=given.folder), read_documents(given.validation)
    for seed, size in product(range(given.seeds), given.sizes):
        if (seed, size) not in has:
            done.append(pair(options, documents, size, seed, given.changes))
            write_json(done, given.json)


if __name__ == "__main__":
    main()
