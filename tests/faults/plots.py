"""`python -m tests.faults.plots`: the soak's figures over time, from its JSON into a picture beside it."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE_INCHES = (12, 6)
DOTS_PER_INCH = 120

PANELS = {
    "resident memory, MB": {"resident_mb": ""},
    "descriptors and threads": {"descriptors": "descriptors", "threads": "threads"},
    "share of cache pages in use": {"pages": ""},
    "a right answer, s": {"p50": "median", "p99": "99%"},
    "processor, s for 100 answers": {"cost": ""},
    "so far": {"preemptions": "preemptions", "cancelled": "disconnects"},
}
"""What each panel shows: fields of a sample, by their labels."""


def soak(told: Mapping[str, Any]) -> Figure:
    samples = list(with_costs(told["samples"]))
    figure = Figure(SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flat
    for panel, (title, series) in zip(panels, PANELS.items(), strict=True):
        for name, label in series.items():
            given = [sample for sample in samples if name in sample]
            panel.plot([at["seconds"] / 60 for at in given], [at[name] for at in given], label=label)
        panel.set_title(title, fontsize="medium")
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.grid(alpha=0.3)
        if len(series) > 1:
            panel.legend()
    for panel in figure.axes[3:]:
        panel.set_xlabel("minutes")
    return figure


def with_costs(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each but the first with the server's processor time since the one before, for 100 answers."""
    costed = [samples[0]]
    for before, now in pairwise(samples):
        spent = now["processor_seconds"] - before["processor_seconds"]
        costed.append(now | ({"cost": 100 * spent / now["answers"]} if now["answers"] else {}))
    return costed


def main() -> None:
    told = json.loads((BENCHMARKS / "soak-http.json").read_text(encoding="utf-8"))
    soak(told).savefig(BENCHMARKS / "soak-http.png")


if __name__ == "__main__":
    main()
