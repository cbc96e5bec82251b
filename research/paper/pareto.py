"""Compare evaluations in a table: `python -m research.paper.pareto small.json calm.json`."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import shown
from nvium_core.evaluation.perplexity import EvaluationError
from nvium_core.evaluation.suite import with_interval
from nvium_core.training.caveats import caveats, warnings
from research.markdown import Row, table
from research.paper.results import SCALES

COLUMNS = (
    "model",
    "parameters",
    "dense's",
    "tokens",
    "dense's",
    "perplexity",
    "dense's",
    "gain, %",
    "mean depth",
    "exits' shares",
    "speed-up, %",
)
PAPERS_COLUMNS = ("paper: gain, %", "mean depth", "speed-up, %")
DENSE = "dense"
OURS = "N-vium"


def read_evaluations(paths: Sequence[Path]) -> list[Figures]:
    """Read files with one evaluation or a list of evaluations. Raise `EvaluationError` naming an invalid file."""
    return [figures for path in paths for figures in read_file(path)]


def read_file(path: Path) -> list[Figures]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: {error}") from error
    found = content if isinstance(content, list) else [content]
    if not found or not all(isinstance(figures, dict) and "model" in figures for figures in found):
        raise EvaluationError(f"{path}: not an evaluation")
    return found


def markdown(evaluations: Sequence[Figures]) -> str:
    """Format a row per evaluation, with the paper's values for the same shape, and warnings below."""
    theirs = [papers(figures) for figures in evaluations]
    columns, rows = list(COLUMNS), [row(figures) for figures in evaluations]
    if any(theirs):
        unknown = [None] * len(PAPERS_COLUMNS)
        columns += PAPERS_COLUMNS
        rows = [[*ours, *(paper or unknown)] for ours, paper in zip(rows, theirs, strict=True)]
    return "\n\n".join([table(columns, rows), *dict.fromkeys(chain(*map(warnings, evaluations)))])


def row(figures: Figures) -> Row:
    speed_up = figures.get("speed_up_percent") if figures.get("speed_up_over", DENSE) == DENSE else None
    bounds = figures.get("speed_up_interval_percent")
    measured = None if speed_up is None else with_interval(shown(speed_up), bounds, 0)
    gain = figures.get("perplexity_gain_percent")
    if gain is not None:
        gain = with_interval(shown(gain), figures.get("perplexity_gain_interval_percent"), 0)
        gain += " (see the warning)" if caveats(figures) else ""
    shares, twin = figures.get("exit_shares"), figures.get("twin", {})
    return [
        figures["model"],
        *(of.get(name) for name in ("num_parameters", "training_tokens", "perplexity") for of in (figures, twin)),
        gain,
        figures.get("mean_depth"),
        " ".join(f"{share:.2f}" for share in shares) if shares else None,
        measured,
    ]


def papers(figures: Figures) -> Row | None:
    """Return the paper's results for a 4-vium with the same layers and width, or None if there are none."""
    scale = SCALES.get((figures.get("num_layers", 0), figures.get("width", 0)))
    if scale is None or len(figures.get("exit_layers", [])) != 4 or figures.get("family", OURS) != OURS:
        return None
    return [scale.perplexity_gain, scale.mean_depth, scale.speed_up]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.paper.pareto", description=__doc__.splitlines()[0])
    parser.add_argument("evaluations", type=Path, nargs="+", help="JSON of nvium evaluate --twin or of baselines")
    args = parser.parse_args(arguments)
    print(markdown(read_evaluations(args.evaluations)))


if __name__ == "__main__":
    main()
