"""Draw the paper's figures for an evaluated model, from the JSON of `nvium evaluate`.

python -m research.figures evaluation.json FOLDER
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.harness import Figures
from nvium_core.evaluation.perplexity import QUANTILES
from research.plots import label, sheet


def exit_names(figures: Figures) -> list[str]:
    return [f"exit {k}\nlayer {depth}" for k, depth in enumerate(figures["exit_layers"], 1)]


def routing(figures: Figures) -> Figure:
    """Plot the mean p_k and the mean posterior of each exit, and the distribution of w_k."""
    figure, [shares, spread] = sheet(figures, 2, share_y=True)
    places, width = range(len(figures["exit_layers"])), 0.4
    shares.bar([x - width / 2 for x in places], figures["exit_shares"], width, label="mean p_k")
    posteriors = figures["exit_posteriors"]
    shares.bar([x + width / 2 for x in places], posteriors, width, label="posterior of the true token", alpha=0.6)
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
    """Plot the perplexity of each exit alone, the mixture, an oracle router and the dense twin."""
    figure, [panel] = sheet(figures)
    bars = dict(zip(exit_names(figures), figures["exit_perplexities"], strict=True))
    bars |= {"π_mix": figures["perplexity"], "oracle\nrouter": figures["oracle_perplexity"]}
    if "twin" in figures:
        bars["dense\ntwin"] = figures["twin"]["perplexity"]
    colours = ["tab:blue"] * len(figures["exit_layers"]) + ["tab:green", "tab:gray", "tab:orange"]
    drawn = panel.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
    panel.bar_label(drawn, fmt="%.4g")
    panel.set_yscale("log")
    label(panel, "", "perplexity")
    return figure


def reliability(figures: Figures) -> Figure:
    """Plot how often the most probable token was correct, as a function of its probability."""
    figure, [panel] = sheet(figures)
    rows = figures["reliability"]
    panel.plot([0, 1], [0, 1], color="black", linewidth=1)
    panel.plot([row["confidence"] for row in rows], [row["accuracy"] for row in rows], "o-", label="π_mix")
    error = f"expected calibration error {figures['calibration_error']:.3f}"
    label(panel, f"probability of the most probable token; {error}", "share that is correct")
    return figure


def staircase(figures: Figures) -> Figure:
    """Plot the median and quartiles of the time since the previous token, by exit."""
    figure, [panel] = sheet(figures)
    steps = [step for step in figures["latency"]["staircase"] if step["tokens"]]
    layers, medians = [step["layer"] for step in steps], [step["median"] for step in steps]
    ranges = [[step["median"] - step["low"] for step in steps], [step["high"] - step["median"] for step in steps]]
    panel.errorbar(layers, medians, yerr=ranges, fmt="o-", capsize=4, label="by exit")
    panel.set_xticks(layers)
    panel.set_ylim(bottom=0)
    label(panel, "layer of the exit", "ms since the previous token")
    return figure


def retrofit_curve(figures: Figures) -> Figure:
    """Plot, by depth, the mixture's perplexity increase over the original, and how often both have the same argmax."""
    figure, [price, same] = sheet(figures, 2)
    for name, text in figures["texts"].items():
        points = [point for point in text["points"] if point["asked_depth"]]
        bars(price, name, points, "price_percent", "price_interval_percent")
        bars(same, name, points, "same_argmax", "same_argmax_interval")
    price.axhline(0, color="black", linewidth=1)
    label(price, "mean depth", "perplexity above the original, %")
    label(same, "mean depth", "share of tokens with the original's argmax")
    return figure


def bars(panel: Axes, name: str, points: Sequence[Figures], what: str, bounds: str) -> None:
    """Plot a line with error bars."""
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
"""For each figure, the evaluation's field that the figure needs, and the function that draws the figure."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.figures", description=__doc__.splitlines()[0])
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    figures = json.loads(args.evaluation.read_text(encoding="utf-8"))
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, (key, draw) in PLOTS.items():
        if key in figures:
            draw(figures).savefig(args.folder / f"{name}.png")


if __name__ == "__main__":
    main()
