"""Compares evaluations: the table of models, and the quality-speed figure. Knows their JSON only.

A point of the figure needs `model`, `speed_up_percent` and `perplexity_gain_percent`, both over the dense twin, and may
name its `family`, whose points are joined by a line; so points of other methods can be drawn too.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from nvium_core.bench.harness import Figures, shown
from nvium_core.evaluation.origin import differences
from nvium_core.evaluation.paired import resolved
from nvium_core.evaluation.paper import SCALES, Point
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.report import Row, table

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
    "theoretical speed-up, %",
    "measured, %",
)
PAPERS_COLUMNS = ("paper: gain, %", "theoretical, %", "measured, %")
DENSE = "dense"
OURS = "N-vium"


def read_evaluations(paths: Sequence[Path]) -> list[Figures]:
    """From files that hold one each, or a list of them. Raises `EvaluationError` naming a file that does not."""
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
    """A row for each, with the paper's row of the same shape; below, which of them were measured on different texts."""
    theirs = [papers(figures) for figures in evaluations]
    columns, rows = list(COLUMNS), [row(figures) for figures in evaluations]
    if any(theirs):
        unknown = [None] * len(PAPERS_COLUMNS)
        columns += PAPERS_COLUMNS
        rows = [[*ours, *(paper or unknown)] for ours, paper in zip(rows, theirs, strict=True)]
    return "\n\n".join(filter(None, (table(columns, rows), differences(evaluations))))


def row(figures: Figures) -> Row:
    speed_up = figures.get("speed_up_percent") if figures.get("speed_up_over", DENSE) == DENSE else None
    measured = None if speed_up is None else resolved(shown(speed_up), figures.get("speed_up_interval_percent"), 0)
    gain = figures.get("perplexity_gain_percent")
    if gain is not None:
        gain = resolved(shown(gain), figures.get("perplexity_gain_interval_percent"), 0)
    shares, twin = figures.get("exit_shares"), figures.get("twin", {})
    return [
        figures["model"],
        *(of.get(name) for name in ("num_parameters", "training_tokens", "perplexity") for of in (figures, twin)),
        gain,
        figures.get("mean_depth"),
        " ".join(f"{share:.2f}" for share in shares) if shares else None,
        figures.get("theoretical_speed_up_percent"),
        measured,
    ]


def papers(figures: Figures) -> Row | None:
    """The paper's 4-vium of the same layers and width; None for other methods."""
    scale = SCALES.get((figures.get("num_layers", 0), figures.get("width", 0)))
    if scale is None or len(figures.get("exit_layers", [])) != 4 or figures.get("family", OURS) != OURS:
        return None
    return [scale.perplexity_gain, scale.theoretical_speed_up, scale.speed_up]


def points(evaluations: Sequence[Figures]) -> dict[str, list[tuple[str, Point]]]:
    """Those with a dense twin, by family. Raises `EvaluationError` if there are none."""
    found: dict[str, list[tuple[str, Point]]] = {}
    for figures in evaluations:
        if "perplexity_gain_percent" in figures and row(figures)[-1] is not None:
            point = Point(figures["speed_up_percent"], figures["perplexity_gain_percent"])
            found.setdefault(figures.get("family", OURS), []).append((figures["model"], point))
    if not found:
        raise EvaluationError("nothing to draw: no evaluation has quality and speed over a dense twin")
    return {family: sorted(named, key=lambda each: each[1]) for family, named in found.items()}


def draw(evaluations: Sequence[Figures], path: Path, *, with_paper: bool = False) -> None:
    """Draws the quality-speed figure. Imports matplotlib."""
    if path.suffix != ".png":
        raise EvaluationError(f"plot: must be a .png, got {path.name}")
    import_module("nvium_core.evaluation.plots").pareto(points(evaluations), with_paper).savefig(path)
