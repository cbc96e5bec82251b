"""Measures the speed-up of each schedule over full depth, in interleaved turns on one engine."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Contender, Workload
from nvium_core.bench.contenders.lineup import BASELINE, OURS, SWEEP
from nvium_core.bench.harness import Figures, Subject, conclusion, interleaved, median_ratio
from nvium_core.bench.peers import rates, summary
from nvium_core.choices import Schedule

SCHEDULES: tuple[Schedule, ...] = OURS, SWEEP, BASELINE


def measure(
    subject: Subject, *, sequences: Sequence[int] = (1, 2, 4, 8), tokens: int = 256, repeats: int = 9
) -> Figures:
    """Measure all schedules at each number of sequences, with `tokens` tokens per sequence. Times include prefill."""
    rows = [compare(subject, workload, repeats) for workload in own.workloads(subject, sequences, tokens)]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, workload: Workload, repeats: int) -> Figures:
    """Measure all schedules on one workload: tokens per second, and the median ratio to full depth."""
    engine = own.engine_for(subject.model, workload)
    contenders: dict[str, Contender] = {name: own.contender(engine, workload, name) for name in SCHEDULES}
    turns = interleaved(contenders, repeats, f"{workload.num_sequences} sequences")
    schedules = {
        name: summary(taken, workload) | {f"over_{BASELINE}": median_ratio(rates(taken), rates(turns[BASELINE]))}
        for name, taken in turns.items()
    }
    return {"sequences": workload.num_sequences, "schedules": schedules}


def table(figures: Figures) -> Table:
    gains = {row["sequences"]: row["schedules"][OURS][f"over_{BASELINE}"] for row in figures["rows"]}
    caption = Text(conclusion(figures["num_exits"], gains))
    result = Table("sequences", "schedule", "tokens/s", f"over {BASELINE}", caption=caption)
    for row in figures["rows"]:
        for name, seen in row["schedules"].items():
            rate, ratio = f"{seen['tokens_per_second']:.1f}", f"{seen[f'over_{BASELINE}']:.3f}"
            result.add_row(str(row["sequences"]), name, rate, ratio, end_section=name == BASELINE)
    return result
