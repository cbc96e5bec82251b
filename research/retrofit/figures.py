"""The figure of a retrofitted model by mean depth."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.figures import Figures
from research.plots import label, sheet


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
    values = [point[what] for point in points]
    sides = [[value - point[bounds][0] for point, value in zip(points, values, strict=True)]]
    sides += [[point[bounds][1] - value for point, value in zip(points, values, strict=True)]]
    panel.errorbar([point["depth"] for point in points], values, yerr=sides, fmt="o-", capsize=4, label=name)
