"""Figures drawn, one function for each experiment that has something to look at. Needs matplotlib, so comes last."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures
from nvium_core.engine.costs import StepCosts

SIZE_INCHES = (8, 4.5)
DOTS_PER_INCH = 120
MEGABYTE = 1e6


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
    figure, [panel] = sheet(figures)
    rows = figures["rows"]
    numbers = [row["sequences"] for row in rows]
    for name in rows[0]["contenders"]:
        rates = [row["contenders"][name]["tokens_per_second"] for row in rows]
        panel.plot(numbers, rates, "o-", label=name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.set_yscale("log")
    label(panel, "sequences at once", "tokens/s")
    return figure


PLOTS: dict[str, Callable[[Figures], Figure]] = {
    "schedules": schedules,
    "memory": memory,
    "chunking": chunking,
    "soak": soak,
    "costs": costs,
    "peers": peers,
}
