"""The paper's figures for any evaluated model, from its figures only. Needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures
from nvium_core.bench.plots import label, sheet
from nvium_core.evaluation import paper
from nvium_core.evaluation.paper import Point
from nvium_core.evaluation.perplexity import QUANTILES

PAPER_STYLE = {"alpha": 0.45, "markersize": 5, "linewidth": 1, "linestyle": "--"}


def exit_names(figures: Figures) -> list[str]:
    return [f"exit {k}\nlayer {depth}" for k, depth in enumerate(figures["exit_layers"], 1)]


def routing(figures: Figures) -> Figure:
    """Mean p_k beside the mean posterior, and the distribution of w_k."""
    figure, [shares, spread] = sheet(figures, 2, share_y=True)
    places, width = range(len(figures["exit_layers"])), 0.4
    shares.bar([x - width / 2 for x in places], figures["exit_shares"], width, label="mean p_k")
    posteriors = figures["exit_posteriors"]
    shares.bar([x + width / 2 for x in places], posteriors, width, label="posterior of the token that came", alpha=0.6)
    shares.set_xticks(places, exit_names(figures))
    label(shares, f"mean depth {figures['mean_depth']:.2f}", "share of tokens")
    marks = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(marks, row, strict=True)) for row in figures["router_quantiles"]]
    if boxes:
        spread.bxp(boxes, positions=places[:-1], showfliers=False)
    spread.set_xticks(places[:-1], exit_names(figures)[:-1])
    label(spread, "w_k: quantiles " + ", ".join(f"{q:g}" for q in QUANTILES), "")
    return figure


def perplexity(figures: Figures) -> Figure:
    """Of each exit alone, the mixture, an oracle router and the dense twin."""
    figure, [panel] = sheet(figures)
    bars = dict(zip(exit_names(figures), figures["exit_perplexities"], strict=True))
    bars |= {"π_mix": figures["perplexity"], "oracle\nrouter": figures["oracle_perplexity"]}
    if "twin" in figures:
        bars["dense\ntwin"] = figures["twin"]["perplexity"]
    colours = ["tab:blue"] * len(figures["exit_layers"]) + ["tab:green", "tab:gray", "tab:orange"]
    drawn = panel.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
    panel.bar_label(drawn, fmt="%.4g")
    panel.set_yscale("log")
    panel.tick_params(axis="y", which="minor", labelleft=False)
    label(panel, "", "perplexity")
    return figure


def reliability(figures: Figures) -> Figure:
    """How often the most probable token came, by its probability."""
    figure, [panel] = sheet(figures)
    rows = figures["reliability"]
    panel.plot([0, 1], [0, 1], color="black", linewidth=1)
    panel.plot([row["confidence"] for row in rows], [row["accuracy"] for row in rows], "o-", label="π_mix")
    error = f"expected calibration error {figures['calibration_error']:.3f}"
    label(panel, f"probability of the most probable token; {error}", "how often it came")
    return figure


def staircase(figures: Figures) -> Figure:
    """Time since the previous token by exit: median and middle half; and the other contenders' means."""
    figure, [panel] = sheet(figures)
    steps = [step for step in figures["latency"]["staircase"] if step["tokens"]]
    layers, medians = [step["layer"] for step in steps], [step["median"] for step in steps]
    ranges = [[step["median"] - step["low"] for step in steps], [step["high"] - step["median"] for step in steps]]
    panel.errorbar(layers, medians, yerr=ranges, fmt="o-", capsize=4, label="by exit")
    for name, colour in (("early exits", "tab:green"), ("full depth", "tab:gray"), ("dense", "tab:orange")):
        times = [each["decoding_milliseconds"].get(name) for each in figures["latency"]["categories"].values()]
        if all(times):
            panel.axhline(sum(times) / len(times), color=colour, linestyle="--", label=f"{name}, mean")
    panel.set_xticks(layers)
    panel.set_ylim(bottom=0)
    label(panel, "layer of the exit", "ms since the token before")
    return figure


def pareto(points: Mapping[str, Sequence[tuple[str, Point]]], with_paper: bool) -> Figure:
    """Quality against speed, both over dense: a line for each family of points, and the paper's."""
    figure = Figure((8, 5.5), dpi=120, layout="constrained")
    panel = figure.subplots()
    for family, named in points.items():
        line(panel, [point for _, point in named], label=family, marker="o")
        for name, point in named:
            panel.annotate(name, point, textcoords="offset points", xytext=(5, 5), fontsize="x-small")
    for family, theirs in paper.PARETO.items() if with_paper else ():
        line(panel, theirs, label=f"paper: {family}", marker="x", **PAPER_STYLE)
    panel.axhline(0, color="black", linewidth=1)
    panel.axvline(0, color="black", linewidth=1)
    label(panel, "measured speed-up over dense, %", "perplexity below dense, %")
    return figure


def line(panel: Axes, points: Sequence[Point], **style: object) -> None:
    panel.plot([point.speed_up for point in points], [point.perplexity_gain for point in points], **style)  # type: ignore[arg-type]


def retrofit_curve(figures: Figures) -> Figure:
    """The mixture's price over the original, and how often both have the same argmax, by mean depth."""
    figure, [price, same] = sheet(figures, 2)
    for name, text in figures["texts"].items():
        points = [point for point in text["points"] if point["asked_depth"]]
        bars(price, name, points, "price_percent", "price_interval_percent")
        bars(same, name, points, "same_argmax", "same_argmax_interval")
    price.axhline(0, color="black", linewidth=1)
    label(price, "mean depth", "perplexity above the original, %")
    label(same, "mean depth", "argmax of π_mix is the original's, share")
    return figure


def bars(panel: Axes, name: str, points: Sequence[Figures], what: str, bounds: str) -> None:
    """A line with its intervals."""
    values = [point[what] for point in points]
    sides = [[value - point[bounds][0] for point, value in zip(points, values, strict=True)]]
    sides += [[point[bounds][1] - value for point, value in zip(points, values, strict=True)]]
    panel.errorbar([point["depth"] for point in points], values, yerr=sides, fmt="o-", capsize=4, label=name)


PLOTS: dict[str, tuple[str, Callable[[Figures], Figure]]] = {
    "routing": ("exit_shares", routing),
    "perplexity": ("exit_perplexities", perplexity),
    "reliability": ("reliability", reliability),
    "staircase": ("latency", staircase),
}
"""By file name: the figure it needs, and its function."""
