"""Plots of a load test: a sweep over its loads, a single load as cumulative shares of requests. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report import LATENCIES, Spread
from loadtest.sweep import Point

SIZE_INCHES = (12, 7)
DOTS_PER_INCH = 120
PERCENTILES = {"p50": "tab:green", "p90": "tab:orange", "p99": "tab:red"}
TITLES = dict(zip(LATENCIES, ("time to first token", "between tokens", "whole request"), strict=True))


def save(points: Sequence[Point], path: Path, title: str) -> None:
    """The file's ending chooses the format."""
    figure = sweep(points) if len(points) > 1 else shares(points[0])
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)


def sweep(points: Sequence[Point]) -> Figure:
    """Rates above, latencies below, by load."""
    points = sorted(points, key=level)
    figure = Figure(SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    above, below = figure.subplots(2, 3, sharex=True)
    tokens(above[0], points)
    requests(above[1], points)
    failures(above[2], points)
    for panel, name in zip(below, LATENCIES, strict=True):
        percentiles(panel, points, name)
        panel.set_xlabel("requests due per second" if points[0].workload.rate else "concurrency")
    for panel in (*above, *below):
        finish(panel, points)
    return figure


def shares(point: Point) -> Figure:
    """Each latency's cumulative distribution."""
    figure = Figure((SIZE_INCHES[0], SIZE_INCHES[1] / 2), dpi=DOTS_PER_INCH, layout="constrained")
    succeeded = [result for result in point.results if result.error is None]
    first = [result.time_to_first_token for result in succeeded]
    values = {
        "time_to_first_token": [seconds for seconds in first if seconds is not None],
        "inter_token_latency": [gap for result in succeeded for gap in result.inter_token_latencies],
        "latency": [result.latency for result in succeeded],
    }
    for panel, (name, seconds) in zip(figure.subplots(1, 3, sharey=True), values.items(), strict=True):
        if seconds:
            panel.ecdf([1000 * each for each in seconds])
        panel.set_xlabel(f"{TITLES[name]}, ms")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share that is no longer")
    return figure


def tokens(panel: Axes, points: Sequence[Point]) -> None:
    panel.plot([level(point) for point in points], [point.report.tokens_per_second for point in points], "o-")
    panel.set_ylabel("tokens per second")


def requests(panel: Axes, points: Sequence[Point]) -> None:
    levels = [level(point) for point in points]
    if points[0].workload.rate:
        panel.plot(levels, levels, "k:", linewidth=1, label="due")
    panel.plot(levels, [point.report.requests_per_second for point in points], "o-", label="answered")
    good = [point.report.goodput for point in points]
    if None not in good:
        panel.plot(levels, good, "s--", color="tab:green", label="within targets", clip_on=False)  # type: ignore[arg-type]
    panel.set_ylabel("requests per second")
    panel.legend()


def failures(panel: Axes, points: Sequence[Point]) -> None:
    parts = [100 * point.report.num_failed / max(len(point.results), 1) for point in points]
    panel.plot([level(point) for point in points], parts, "o-", color="tab:red", clip_on=False)
    panel.set_ylabel("requests that failed, %")
    panel.set_ylim(top=100)


def percentiles(panel: Axes, points: Sequence[Point], name: str) -> None:
    found: list[tuple[float, Spread]] = [
        (level(point), spread) for point in points if (spread := getattr(point.report.latencies, name))
    ]
    for percentile, colour in PERCENTILES.items():
        values = [1000 * getattr(spread, percentile) for _, spread in found]
        panel.plot([place for place, _ in found], values, "o-", color=colour, label=percentile)
    panel.set_ylabel(f"{TITLES[name]}, ms")
    panel.legend()


def finish(panel: Axes, points: Sequence[Point]) -> None:
    levels = [level(point) for point in points]
    if points[0].workload.rate is None:
        panel.set_xscale("log", base=2)
    panel.set_xticks(levels, [f"{each:g}" for each in levels])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def level(point: Point) -> float:
    return point.workload.rate or point.workload.concurrency
