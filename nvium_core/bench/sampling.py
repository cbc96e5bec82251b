"""Measures each sampling mode: its cost over plain sampling at temperature 1, and its speed-up from early exits.

Each mode runs with the schedule `race` and with `whole`. All runs take turns on one engine and use the same seeds.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Generation, Workload
from nvium_core.bench.contenders.lineup import BASELINE, OURS
from nvium_core.bench.harness import Figures, Subject, count, interleaved, ratio, spread
from nvium_core.bench.peers import checked_turn, rates, summary
from nvium_core.engine.params import SamplingParams

PLAIN = "plain"
MODES: dict[str, Mapping[str, Any]] = {
    PLAIN: {},
    "top-p": {"temperature": 0.7, "top_p": 0.95},
    "top-k": {"top_k": 40},
    "min-p": {"min_p": 0.05},
    "penalty": {"presence_penalty": 1},
    "temperature 0": {"temperature": 0},
    "mixture": {"sampling": "mixture"},
}
"""Mode → its sampling parameters. By default a mode samples from the exits at temperature 1."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8), tokens: int = 64, repeats: int = 9) -> Figures:
    """Measure all modes at each number of sequences, with `tokens` tokens per sequence. Times include prefill."""
    rows = [compare(subject, workload, repeats) for workload in own.workloads(subject, sequences, tokens)]
    return {"ways": MODES, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, workload: Workload, repeats: int) -> Figures:
    """Measure all modes on one workload. Rates are in tokens per second."""
    engine = own.engine_for(subject.model, workload)
    contenders = {}
    for mode, schedule in product(MODES, (OURS, BASELINE)):
        params = SamplingParams(**{"sampling": "exits", **MODES[mode]})
        contender = own.contender(engine, workload, schedule, params)
        contenders[f"{mode}/{schedule}"] = checked_turn(mode, contender, workload)
    turns = interleaved(contenders, repeats, count(workload.num_sequences, "sequence"))
    plain = turns[f"{PLAIN}/{OURS}"]
    modes = {mode: compared(turns[f"{mode}/{OURS}"], turns[f"{mode}/{BASELINE}"], plain, workload) for mode in MODES}
    return {"sequences": workload.num_sequences, "ways": modes}


def compared(
    turns: Sequence[Generation], dense: Sequence[Generation], plain: Sequence[Generation], workload: Workload
) -> Figures:
    """Return the rates of one mode, and their ratios to plain sampling and to full depth."""
    return {
        **summary(turns, workload),
        **ratio("over_plain", rates(turns), rates(plain)),
        **ratio(f"over_{BASELINE}", rates(turns), rates(dense)),
        BASELINE: summary(dense, workload),
    }


def table(figures: Figures) -> Table:
    names = "over_plain", f"over_{BASELINE}"
    result = Table("sequences", "mode", "tokens/s", "over plain", f"over {BASELINE}")
    for row in figures["rows"]:
        *_, last = row["ways"]
        for name, seen in row["ways"].items():
            rate, ratios = f"{seen['tokens_per_second']:.1f}", (spread(over, seen) for over in names)
            result.add_row(str(row["sequences"]), name, rate, *ratios, end_section=name == last)
    return result
