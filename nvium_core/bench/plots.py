"""Figures drawn, one function for each experiment that has something to look at. Needs matplotlib, so comes last."""

from collections.abc import Callable, Sequence
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures
from nvium_core.choices import Schedule
from nvium_core.engine.schedule.costs import StepCosts

SIZE_INCHES = (8, 4.5)
DOTS_PER_INCH = 120
MEGABYTE = 1e6

PAPER_SHARES = {
    "6x768": -0.083 / 0.333,
    "12x768": 0.109 / 0.414,
    "24x768": 0.268 / 0.48,
    "36x768": 0.364 / 0.536,
    "48x768": 0.416 / 0.582,
}
"""Of the gain that its routing promises, what the paper measured of each depth, on an A100."""


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


def schedules(figures: Figures) -> Figure:
    """Measured and predicted gains by the number of sequences."""
    figure, [panel] = sheet(figures)
    numbers = [row["sequences"] for row in figures["rows"]]
    for name, colour in (("optimal", "tab:blue"), ("sweep", "tab:orange")):
        seen = [row["schedules"][name] for row in figures["rows"]]
        panel.plot(numbers, [each["over_synchronous"] for each in seen], "o-", color=colour, label=name)
        predicted = [each["predicted_over_synchronous"] for each in seen]
        panel.plot(numbers, predicted, "x--", color=colour, label=f"{name}, simulated")
    panel.axhline(1, color="black", linewidth=1)
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    label(panel, "sequences at once", "tokens/s over synchronous")
    return figure


def memory(figures: Figures) -> Figure:
    """Bytes owned and needed over time, and what full contexts would take."""
    row = figures["rows"][-1]
    figure, [panel] = sheet(figures)
    steps = [sample["step"] for sample in row["samples"]]
    for name, style in (("full_context", ":"), ("owned", "-"), ("needed", "--")):
        megabytes = [sample[f"{name}_bytes"] / MEGABYTE for sample in row["samples"]]
        panel.plot(steps, megabytes, style, label=name.replace("_", " "))
    label(panel, "step", f"MB of {row['sequences']} sequences")
    return figure


def chunking(figures: Figures) -> Figure:
    """Every gap of the streams by the time it ended, both ways."""
    row = figures["rows"][-1]
    figure, panels = sheet(figures, len(row["ways"]), share_y=True)
    for panel, (name, way) in zip(panels, row["ways"].items(), strict=True):
        ends, lengths = zip(*way["gaps"], strict=True)
        panel.plot(ends, lengths, ".", markersize=4)
        panel.axvspan(0, way["first_token_ms"], alpha=0.15, color="tab:red", label="newcomer waits")
        panel.set_title(f"prompt {name}")
        label(panel, "ms since the newcomer came", "ms between tokens of a stream")
    return figure


def soak(figures: Figures) -> Figure:
    """Resident memory and Python objects by requests ended."""
    figure, panels = sheet(figures, 2)
    requests = [sample["requests"] for sample in figures["samples"]]
    for panel, name, unit, text in (
        (panels[0], "resident_bytes", MEGABYTE, "resident MB"),
        (panels[1], "objects", 1000, "thousand Python objects"),
    ):
        panel.plot(requests, [sample[name] / unit for sample in figures["samples"]])
        panel.set_ylim(bottom=0)
        label(panel, "requests", text)
    return figure


def costs(figures: Figures) -> Figure:
    """Each block's measured points, and the fit."""
    figure, [panel] = sheet(figures)
    for block, points in StepCosts.from_dict(figures).points.items():
        fixed, per_row = figures["fixed_ms"][block], figures["per_row_ms"][block]
        [line] = panel.plot(list(points), [1000 * cost for cost in points.values()], "o", label=f"block {block + 1}")
        panel.plot(list(points), [fixed + per_row * rows for rows in points], "--", color=line.get_color())
    label(panel, "rows", "ms")
    return figure


def peers(figures: Figures) -> Figure:
    """Tokens per second of every contender by the number of sequences."""
    return contenders(figures, "sequences", "tokens_per_second", "sequences at once", "tokens/s")


def prompts(figures: Figures) -> Figure:
    """Time to the first token of every contender by the length of the prompt."""
    return contenders(figures, "prompt_tokens", "first_token_ms", "tokens of the prompt", "ms to the first token")


def contenders(figures: Figures, by: str, what: str, x: str, y: str) -> Figure:
    """A line for each, our schedules' unbroken."""
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
    """What leaving early gave one sequence, beside the limit, and its share of the gain, shape by shape."""
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
    """Each time of a load test's requests by their rate, planned beside measured."""
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
    "schedules": schedules,
    "memory": memory,
    "chunking": chunking,
    "soak": soak,
    "costs": costs,
    "peers": peers,
    "prompts": prompts,
}

PLOTS_BY_SHAPE: dict[str, Callable[[Sequence[Figures]], Figure]] = {"peers": peers_by_shape}
"""Of runs that differ in nothing but the model's shape."""
