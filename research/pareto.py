"""Compare evaluations in a table and in the quality-speed figure.

    python -m research.pareto small.json calm.json --plot pareto.png --paper

For a point in the figure, an evaluation needs the fields `model`, `speed_up_percent` and `perplexity_gain_percent`,
relative to the dense twin. A line joins the points of one `family` or, for our own recipes, of one series such as
`small-beta-…`. Error bars are 95% intervals.
"""

import json
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures, shown
from nvium_core.evaluation.paired import with_interval
from nvium_core.evaluation.predictions import EvaluationError
from research.markdown import Row, table
from research.paper import PARETO, SCALES, Point
from research.plots import label

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
SETTING = re.compile(r"-[\d.]+$")


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
    """Format a row per evaluation, with the paper's values for the same shape."""
    theirs = [papers(figures) for figures in evaluations]
    columns, rows = list(COLUMNS), [row(figures) for figures in evaluations]
    if any(theirs):
        unknown = [None] * len(PAPERS_COLUMNS)
        columns += PAPERS_COLUMNS
        rows = [[*ours, *(paper or unknown)] for ours, paper in zip(rows, theirs, strict=True)]
    return table(columns, rows)


def row(figures: Figures) -> Row:
    speed_up = figures.get("speed_up_percent") if figures.get("speed_up_over", DENSE) == DENSE else None
    bounds = figures.get("speed_up_interval_percent")
    measured = None if speed_up is None else with_interval(shown(speed_up), bounds, 0)
    gain = figures.get("perplexity_gain_percent")
    if gain is not None:
        gain = with_interval(shown(gain), figures.get("perplexity_gain_interval_percent"), 0)
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
    """Return the paper's results for a 4-vium with the same layers and width, or None if there are none."""
    scale = SCALES.get((figures.get("num_layers", 0), figures.get("width", 0)))
    if scale is None or len(figures.get("exit_layers", [])) != 4 or figures.get("family", OURS) != OURS:
        return None
    return [scale.perplexity_gain, scale.theoretical_speed_up, scale.speed_up]


def points(evaluations: Sequence[Figures]) -> dict[str, list[tuple[Point, Figures]]]:
    """Return the evaluations with a dense twin, by series and speed. Raise `EvaluationError` if there are none."""
    found: dict[str, list[tuple[Point, Figures]]] = {}
    for figures in evaluations:
        if "perplexity_gain_percent" in figures and row(figures)[-1] is not None:
            point = Point(figures["speed_up_percent"], figures["perplexity_gain_percent"])
            found.setdefault(series(figures), []).append((point, figures))
    if not found:
        raise EvaluationError("nothing to draw: no evaluation has quality and speed relative to a dense twin")
    return {name: sorted(those, key=lambda each: each[0]) for name, those in found.items()}


def series(figures: Figures) -> str:
    """Return the family, or the recipe's name without its last number, such as `small-beta` for `small-beta-0.1`."""
    return str(figures.get("family") or SETTING.sub("", figures["model"]))


def reach(value: float, interval: Sequence[float] | None) -> list[list[float]]:
    """Return an error bar's lengths below and above the value."""
    low, high = interval or (value, value)
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def draw(evaluations: Sequence[Figures], path: Path, *, with_paper: bool = False) -> None:
    """Plot quality over speed, both relative to dense, with a line per series and the paper's points."""
    figure = Figure((8, 5.5), dpi=120, layout="constrained")
    panel = figure.subplots()
    for name, those in points(evaluations).items():
        [line] = panel.plot(*zip(*(point for point, _ in those), strict=True), label=name, marker="o")
        for point, figures in those:
            speed = reach(point[0], figures.get("speed_up_interval_percent"))
            gain = reach(point[1], figures.get("perplexity_gain_interval_percent"))
            panel.errorbar(*point, xerr=speed, yerr=gain, color=line.get_color(), capsize=2, linewidth=1)
            panel.annotate(figures["model"], point, textcoords="offset points", xytext=(5, 5), fontsize="x-small")
    for family, theirs in PARETO.items() if with_paper else ():
        panel.plot(*zip(*theirs, strict=True), label=f"paper: {family}", marker="x", linestyle="--", alpha=0.45)
    panel.axhline(0, color="black", linewidth=1)
    panel.axvline(0, color="black", linewidth=1)
    label(panel, "measured speed-up over dense, %", "perplexity below dense, %")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.pareto", description=__doc__.splitlines()[0])
    parser.add_argument("evaluations", type=Path, nargs="+", help="JSON of nvium evaluate --twin or of baselines")
    parser.add_argument("--plot", type=Path, help=".png file for the quality-speed figure")
    parser.add_argument("--paper", action="store_true", help="also plot the paper's points")
    args = parser.parse_args(arguments)
    found = read_evaluations(args.evaluations)
    print(markdown(found))
    if args.plot:
        draw(found, args.plot, with_paper=args.paper)


if __name__ == "__main__":
    main()
