"""Plots of the experiments that pages show. Needs matplotlib, so is imported last."""

from collections.abc import Callable, Sequence
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures
from nvium_core.choices import Schedule

SIZE_INCHES = (8, 4.5)
DOTS_PER_INCH = 120

PAPER_SHARES = {
    "6x768": -0.083 / 0.333,
    "12x768": 0.109 / 0.414,
    "24x768": 0.268 / 0.48,
    "36x768": 0.364 / 0.536,
    "48x768": 0.416 / 0.582,
}
"""The paper's measured share of the possible gain for each depth, on an A100."""


PERCENTILE_COLOURS = {50: "tab:blue", 95: "tab:orange", 99: "tab:red"}


def sheet(figures: Figures, num_panels: int = 1, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels side by side."""
    figure = Figure(SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(f"{figures['model']}, {figures['dtype']}, {figures['device']}", fontsize="medium")
    panels = figure.subplots(1, num_panels, squeeze=False, sharey=share_y)[0]
    return figure, list(panels)


def label(panel: Axes, x: str, y: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend()


def peers(figures: Figures) -> Figure:
    """Tokens per second by number of sequences."""
    return contenders(figures, "sequences", "tokens_per_second", "sequences at once", "tokens/s")


def prompts(figures: Figures) -> Figure:
    """Time to first token by prompt length."""
    return contenders(figures, "prompt_tokens", "first_token_ms", "tokens of the prompt", "ms to the first token")


def contenders(figures: Figures, by: str, what: str, x: str, y: str) -> Figure:
    """A line for each contender; our schedules' are solid."""
    figure, [panel] = sheet(figures)
    rows = figures["rows"]
    numbers = [row[by] for row in rows]
    for name in rows[0]["contenders"]:
        style = "o-" if name in get_args(Schedule) else "o--"
        panel.plot(numbers, [row["contenders"][name][what] for row in rows], style, label=name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    label(panel, x, y)
    return figure


def peers_by_shape(runs: Sequence[Figures]) -> Figure:
    """One sequence's speed-up, the limit and the share of it, by shape."""
    figure, [speeds, shares] = sheet(runs[0] | {"model": "random weights"}, 2)
    shapes = [run["model"].removeprefix("random-") for run in runs]
    gains = [next(row["gain"] for row in run["rows"] if row["sequences"] == 1) for run in runs]
    for panel, style, text, name in (
        (speeds, "o-", "measured", "ratio"),
        (speeds, "x--", "limit", "limit"),
        (shares, "o-", "of the limit", "share_of_limit"),
        (shares, "x--", "with junctions paid in both", "share_of_limit_with_junctions_paid"),
    ):
        panel.plot(shapes, [gain[name] for gain in gains], style, label=text)
    if known := [shape for shape in shapes if shape in PAPER_SHARES]:
        shares.plot(known, [PAPER_SHARES[shape] for shape in known], ":", marker="s", color="grey", label="paper, A100")
    label(speeds, "layers x width", "tokens/s over synchronous")
    label(shares, "layers x width", "share of the gain")
    return figure


def forecast(figures: Figures) -> Figure:
    """A load test's percentiles by rate, planned and measured."""
    loads = figures["loads"]
    figure = Figure((12, 4), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, measure in zip(panels, ("first_token", "between_tokens", "total"), strict=True):
        for percentile, colour in PERCENTILE_COLOURS.items():
            for way, style in (("measured", "o-"), ("planned", "x--")):
                times = [1000 * load[way][measure][percentile] for load in loads]
                name = f"p{percentile}, {way}"
                panel.plot([load["rate"] for load in loads], times, style, color=colour, label=name)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        label(panel, "requests per second", f"{measure.replace('_', ' ')}, ms")
    return figure


PLOTS: dict[str, Callable[[Figures], Figure]] = {
    "peers": peers,
    "prompts": prompts,
}

PLOTS_BY_SHAPE: dict[str, Callable[[Sequence[Figures]], Figure]] = {"peers": peers_by_shape}
"""For runs that differ in the model's shape only."""
