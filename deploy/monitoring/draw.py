"""Draws the dashboard's panels from a running Prometheus, without Grafana.

python deploy/monitoring/draw.py docs/figures/dashboard.png --prometheus http://127.0.0.1:9090 --minutes 5
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter

PANELS = json.loads((Path(__file__).parent / "nvium.json").read_text())["panels"]
NUM_POINTS = 150
WINDOW = "20s"
"""Grafana's $__rate_interval: four times the scrape interval."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for colour-blind readers."""

INCHES_PER_COLUMN, INCHES_PER_ROW = 0.75, 0.4
UNITS: dict[str, Callable[[], Formatter]] = {
    "short": EngFormatter,
    "s": partial(EngFormatter, "s"),
    "reqps": partial(EngFormatter, "/s"),
    "percentunit": partial(PercentFormatter, 1),
}


def lines(http: httpx.Client, target: dict[str, Any], seconds: float) -> list[tuple[str, list[float], list[float]]]:
    """For each series of a query: its legend, seconds before now, and values."""
    now = time.time()
    query = target["expr"].replace("$__rate_interval", WINDOW).replace("$instance", ".*")
    asked = {"query": query, "start": now - seconds, "end": now, "step": seconds / NUM_POINTS}
    answer = http.get("/api/v1/query_range", params=asked).raise_for_status().json()
    return [
        (
            legend(target["legendFormat"], series["metric"]),
            [float(at) - now for at, _ in series["values"]],
            [float(value) for _, value in series["values"]],
        )
        for series in answer["data"]["result"]
    ]


def legend(form: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        form = form.replace(f"{{{{{name}}}}}", value)
    return form


def draw(axes: Axes, panel: dict[str, Any], http: httpx.Client, seconds: float) -> None:
    drawn = [line for target in panel["targets"] for line in lines(http, target, seconds)]
    defaults = panel["fieldConfig"]["defaults"]
    formatter = UNITS[defaults["unit"]]()
    axes.yaxis.set_major_formatter(formatter)
    title = panel["title"]
    if panel["type"] == "stat":
        known = [value for value in drawn[0][2] if math.isfinite(value)]
        title = f"{title}: {formatter(float(f'{known[-1]:.3g}'))}"
    if "stacking" in defaults["custom"]:
        times = max((at for _, at, _ in drawn), key=len)
        whole = [[0.0] * (len(times) - len(values)) + values for _, _, values in drawn]
        axes.stackplot(times, whole, labels=[name for name, _, _ in drawn], colors=COLOURS, alpha=0.8)
    else:
        for (name, at, values), colour in zip(drawn, COLOURS, strict=False):
            axes.plot(at, values, label=name, color=colour, linewidth=1)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(-seconds, 0)
    room_for_legend = 1.2 * axes.get_ylim()[1]
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max", room_for_legend))
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if any(name for name, _, _ in drawn):
        axes.legend(fontsize=7, ncols=3, framealpha=0.5, loc="upper left").set_in_layout(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    width = max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in PANELS)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS)
    figure = plt.figure(figsize=(width * INCHES_PER_COLUMN, height * INCHES_PER_ROW), layout="constrained")
    grid = figure.add_gridspec(height, width)
    with httpx.Client(base_url=given.prometheus, timeout=30) as http:
        for panel in PANELS:
            place = panel["gridPos"]
            cell = grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]]
            axes = figure.add_subplot(cell)
            if panel["type"] == "row":
                axes.axis("off")
                axes.text(0, 0, panel["title"], fontsize=11, weight="bold")
            else:
                draw(axes, panel, http, 60 * given.minutes)
    figure.savefig(given.file, dpi=100)


if __name__ == "__main__":
    main()
