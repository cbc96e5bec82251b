"""Measures the speed-up of each schedule over full depth, in interleaved turns on one engine.

If the blocks share their weights, it also measures the costs of a pass in the same turns, and the share of the possible
speed-up that `race` reaches.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Workload
from nvium_core.bench.contenders.lineup import BASELINE, OURS, SWEEP
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject, conclusion, count, interleaved, ratio, spread
from nvium_core.bench.peers import rates, summary
from nvium_core.bench.tied_limit import pass_seconds, pass_workloads, possible
from nvium_core.choices import Schedule
from nvium_core.model.plan import is_tied

OVER, SHARE = f"over_{BASELINE}", "share_reached"
SCHEDULES: tuple[Schedule, ...] = OURS, SWEEP, BASELINE


def measure(
    subject: Subject, *, sequences: Sequence[int] = (1, 2, 4, 8), tokens: int = 256, repeats: int = 9
) -> Figures:
    """Measure all schedules at each number of sequences, with `tokens` tokens per sequence. Times include prefill."""
    rows = [compare(subject, workload, repeats) for workload in own.workloads(subject, sequences, tokens)]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, workload: Workload, repeats: int) -> Figures:
    """Measure all schedules on one workload: tokens per second, and the ratio to full depth."""
    model, num_blocks = subject.model, subject.model.config.num_exits
    timed = pass_workloads(workload, num_blocks) if num_blocks > 1 and is_tied(model.model.blocks) else []
    engine = own.engine_for(model, workload, *timed)
    contenders: dict[Any, Callable[[int], Any]] = {name: own.contender(engine, workload, name) for name in SCHEDULES}
    contenders |= {each.num_sequences: partial(pass_seconds, engine, each) for each in timed}
    turns = interleaved(contenders, repeats, count(workload.num_sequences, "sequence"))
    schedules = {
        name: summary(turns[name], workload) | ratio(OVER, rates(turns[name]), rates(turns[BASELINE]))
        for name in SCHEDULES
    }
    row = {"sequences": workload.num_sequences, "schedules": schedules}
    return row | (
        {"limit": limit(turns, [each.num_sequences for each in timed], workload, num_blocks)} if timed else {}
    )


def limit(turns: Mapping[Any, Any], num_rows: Sequence[int], workload: Workload, num_blocks: int) -> Figures:
    """Return the median time of passes by rows, the possible speed-up over `whole`, and the share that `race` reaches.

    turns: of all schedules, and of passes with each of `num_rows` rows.
    """
    costs = [dict(zip(num_rows, each, strict=True)) for each in zip(*(turns[rows] for rows in num_rows), strict=True)]
    pairs = zip(costs, turns[BASELINE], strict=True)
    limits = [possible(passes, whole, workload, num_blocks) for passes, whole in pairs]
    gains = [ours / whole for ours, whole in zip(rates(turns[OURS]), rates(turns[BASELINE]), strict=True)]
    milliseconds = {str(rows): 1000 * median(turns[rows]) for rows in num_rows}
    return {"pass_ms": milliseconds, **ratio(OVER, limits, [1.0] * len(limits)), **ratio(SHARE, gains, limits)}


def table(figures: Figures) -> Table:
    gains = {row["sequences"]: row["schedules"][OURS] for row in figures["rows"]}
    result = Table("sequences", "schedule", "tokens/s", f"over {BASELINE}")
    result.caption = conclusion(figures["num_exits"], OVER, gains)
    for row in figures["rows"]:
        for name, seen in row["schedules"].items():
            result.add_row(str(row["sequences"]), name, f"{seen['tokens_per_second']:.1f}", spread(OVER, seen))
        if "limit" in row:
            result.add_row("", "possible", "", spread(OVER, row["limit"]))
            result.add_row("", f"share of {OURS}", "", spread(SHARE, row["limit"]))
        result.add_section()
    return result
