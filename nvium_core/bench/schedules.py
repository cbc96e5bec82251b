"""Measures the speed-up of each schedule over full depth, in interleaved turns on one engine."""

from collections.abc import Sequence

from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Contender, Workload
from nvium_core.bench.contenders.lineup import BASELINE, OURS, SWEEP
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject, conclusion, count, interleaved, ratio, spread
from nvium_core.bench.peers import rates, summary
from nvium_core.choices import Schedule

OVER = f"over_{BASELINE}"
SCHEDULES: tuple[Schedule, ...] = OURS, SWEEP, BASELINE


def measure(
    subject: Subject, *, sequences: Sequence[int] = (1, 2, 4, 8), tokens: int = 256, repeats: int = 9
) -> Figures:
    """Measure all schedules at each number of sequences, with `tokens` tokens per sequence. Times include prefill."""
    rows = [compare(subject, workload, repeats) for workload in own.workloads(subject, sequences, tokens)]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, workload: Workload, repeats: int) -> Figures:
    """Measure all schedules on one workload: tokens per second, and the ratio to full depth."""
    engine = own.engine_for(subject.model, workload)
    contenders: dict[str, Contender] = {name: own.contender(engine, workload, name) for name in SCHEDULES}
    turns = interleaved(contenders, repeats, count(workload.num_sequences, "sequence"))
    schedules = {
        name: summary(taken, workload) | ratio(OVER, rates(taken), rates(turns[BASELINE]))
        for name, taken in turns.items()
    }
    return {"sequences": workload.num_sequences, "schedules": schedules}


def table(figures: Figures) -> Table:
    gains = {row["sequences"]: row["schedules"][OURS] for row in figures["rows"]}
    result = Table("sequences", "schedule", "tokens/s", f"over {BASELINE}")
    result.caption = conclusion(figures["num_exits"], OVER, gains)
    for row in figures["rows"]:
        for name, seen in row["schedules"].items():
            cells = str(row["sequences"]), name, f"{seen['tokens_per_second']:.1f}", spread(OVER, seen)
            result.add_row(*cells, end_section=name == BASELINE)
    return result
