"""Measure the gain of `small` over its dense twin by vocabulary size, depth and text.

    python -m research.paper.vocabulary --data train.txt.xz --validation valid.txt.xz --json vocabulary.json
    python -m research.paper.vocabulary … --sizes 8192 --depths 0.6 0.5 0.4
    python -m research.paper.vocabulary … --sizes 2048 --tokens 8e6

A mixture of exits has an output of higher rank than a single softmax. A small vocabulary does not need the higher rank
(softmax bottleneck). Without `--depths`, β is 0. All runs are stored in one folder, and interrupted runs resume. After
each run, the results of the run and its twin are added to the JSON. Runs and twins in the JSON are not trained again.
"""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from nvium_core.bench.figures import Figures, write_json
from nvium_core.evaluation.perplexity import EvaluationError, evaluate
from nvium_core.evaluation.suite import description, perplexity_gain, twin_figures
from nvium_core.loading import LoadedModel, load_model
from nvium_core.options import RunOptions
from nvium_core.training.data.texts import documents_of
from nvium_core.training.recipes.catalogue import DENSE, recipe_named
from nvium_core.training.train import train

SIZES = (512, 8192, 2048)
"""Vocabulary sizes, the extremes first."""

SEEDS = (0, 1, 2)
TOKENS = 2e6
RECIPE = "small"
FIRST_BETA = 0.02
"""Initial β of steered runs."""


@dataclass(frozen=True)
class Case:
    """A run's vocabulary size, seed, training tokens, and target depth or None."""

    vocab_size: int
    seed: int
    depth: float | None
    num_tokens: int

    @property
    def name(self) -> str:
        steered = f"-depth-{self.depth:g}" if self.depth else ""
        return f"{RECIPE}-{self.vocab_size}{steered}-seed-{self.seed}{self._longer}"

    @property
    def twin_name(self) -> str:
        return f"{RECIPE}{DENSE}-{self.vocab_size}-seed-{self.seed}{self._longer}"

    @property
    def _longer(self) -> str:
        return "" if self.num_tokens == TOKENS else f"-tokens-{self.num_tokens}"

    @property
    def settings(self) -> list[str]:
        beta = [f"beta.initial={FIRST_BETA}", f"beta.depth={self.depth}"] if self.depth else ["beta.initial=0"]
        return [
            *beta,
            f"shape.vocab_size={self.vocab_size}",
            f"seed={self.seed}",
            f"total_tokens={self.num_tokens}",
        ]


class Series:
    """The runs on one text, and their results."""

    def __init__(
        self,
        options: RunOptions,
        validation: Path,
        changes: Sequence[str],
        done: list[Figures],
        works: Sequence[str] | None = None,
    ) -> None:
        self.options, self.changes, self.done, self.works = options, changes, done, works
        self.documents = list(documents_of(validation))

    def has(self, case: Case) -> bool:
        return any(case == case_of(figures) for figures in self.done)

    def run(self, case: Case) -> Figures:
        """Train and evaluate a run and its twin. Return results like those of `nvium evaluate --twin`."""
        ours = self.trained(RECIPE, case.name, case)
        found = evaluate(ours.model, ours.tokenizer, self.documents)
        kept = ("num_tokens", "num_characters", "perplexity", "bits_per_character", "exit_shares", "mean_depth")
        twin = self.twin(case)
        if found["document_tokens"] != twin["document_tokens"]:
            raise EvaluationError(f"{case.name}: the tokenizer differs from that of {twin['model']}")
        about = description(ours)
        return {
            **about,
            "vocab_size": case.vocab_size,
            "width_over_vocabulary": ours.model.config.hidden_size / case.vocab_size,
            "seed": case.seed,
            "asked_depth": case.depth,
            **{name: found[name] for name in kept},
            "twin": twin,
            **perplexity_gain(about | found | {"document_works": self.works}, twin),
        }

    def twin(self, case: Case) -> Figures:
        """Return the dense twin's results. If an earlier run has the same twin, reuse its results."""
        for figures in self.done:
            if replace(case_of(figures), depth=None) == replace(case, depth=None):
                known: Figures = figures["twin"]
                return known
        return twin_figures(self.trained(f"{RECIPE}{DENSE}", case.twin_name, case), self.documents)

    def trained(self, recipe: str, name: str, case: Case) -> LoadedModel:
        """Load a run's model, training it first if necessary."""
        folder = self.options.folder / name
        model = folder / "model"
        if not model.is_dir():
            settings = [*case.settings, *self.changes]
            model = train(recipe_named(recipe, settings), replace(self.options, folder=folder))
        return load_model(str(model), "cpu")


def case_of(figures: Figures) -> Case:
    return Case(figures["vocab_size"], figures["seed"], figures.get("asked_depth"), figures["training_tokens"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.paper.vocabulary", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--works", type=Path, help="the work of each document, one per line: intervals resample works")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/vocabulary"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--depths", type=float, nargs="+", default=[None], help="target mean depths [none: β is 0]")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--tokens", type=float, default=TOKENS, help="training tokens per run")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as for nvium train")
    args = parser.parse_args(arguments)
    done: list[Figures] = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else []
    works = args.works.read_text(encoding="utf-8").splitlines() if args.works else None
    series = Series(RunOptions(data=args.data, folder=args.folder), args.validation, args.changes, done, works)
    for seed, depth, size in product(args.seeds, args.depths, args.sizes):
        case = Case(size, seed, depth, round(args.tokens))
        if not series.has(case):
            done.append(series.run(case))
            write_json(done, args.json)


if __name__ == "__main__":
    main()
