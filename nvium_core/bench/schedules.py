"""Measures the speed-up of each schedule over full depth, in interleaved turns on one engine.

If the blocks share their weights, it also measures the costs of a pass in the same turns. From them follow the speed-up
that is possible, and the share of it that `race` reaches. A pass is one run of all layers. At full depth each token
takes N passes, with a row for each stream. With tied blocks, a token that leaves at exit k takes k passes, which also
carry the rows of earlier tokens through other blocks. So both run N rows for a token, but a pass of more rows costs
little more, until arithmetic binds. All other time, such as that of heads, is the same.

Shapes: R rows of a pass.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from nvium_core.bench.contenders.contender import Generation, Workload
from nvium_core.bench.contenders.lineup import BASELINE, OURS, SWEEP, contender, engine_for, workloads
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject, conclusion, count, interleaved, ratio, spread
from nvium_core.bench.peers import rates, summary
from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.step import WHOLE
from nvium_core.engine.schedule.tuner import Tuner
from nvium_core.model.plan import is_tied

OVER, SHARE = f"over_{BASELINE}", "share_reached"
SCHEDULES: tuple[Schedule, ...] = OURS, SWEEP, BASELINE

PASS_TOKENS = 8  # tokens of a sequence while passes are timed

Distribution = NDArray[np.float64]


def measure(
    subject: Subject, *, sequences: Sequence[int] = (1, 2, 4, 8), tokens: int = 256, repeats: int = 9
) -> Figures:
    """Measure all schedules at each number of sequences, with `tokens` tokens per sequence. Times include prefill."""
    rows = [compare(subject, workload, repeats) for workload in workloads(subject, sequences, tokens)]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, workload: Workload, repeats: int) -> Figures:
    """Measure all schedules on one workload: tokens per second, and the ratio to full depth."""
    model, num_blocks = subject.model, subject.model.config.num_exits
    timed = pass_workloads(workload, num_blocks) if num_blocks > 1 and is_tied(model.model.blocks) else []
    engine = engine_for(model, workload, *timed)
    contenders: dict[Any, Callable[[int], Any]] = {name: contender(engine, workload, name) for name in SCHEDULES}
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


def pass_workloads(workload: Workload, num_blocks: int) -> list[Workload]:
    """Return workloads whose passes have 1, 2, 4 … times the rows of this one, as many as a tied pass may have.

    Their prompts have one token, so that no pass has more rows.
    """
    factors = [2**power for power in range((num_blocks - 1).bit_length() + 1)]
    numbers = [workload.num_sequences * factor for factor in factors]
    return [Workload(prompt=workload.prompt[:1], num_sequences=number, num_tokens=PASS_TOKENS) for number in numbers]


def pass_seconds(engine: Engine, workload: Workload, turn: int) -> float:
    """Return the mean time of a pass with a row for each sequence of the workload."""
    engine.scheduler.schedules = Tuner((WHOLE,))
    for seed in workload.seeds(turn):
        engine.add(str(seed), workload.prompt, SamplingParams(max_tokens=workload.num_tokens, ignore_eos=True))
    num_passes, seconds = 0, 0.0
    while engine.has_work:
        engine.step()
        for report in engine.reports:
            if report.num_rows == workload.num_sequences * report.num_passes:
                num_passes, seconds = num_passes + report.num_passes, seconds + report.seconds
    return seconds / num_passes


def possible(passes: Mapping[int, float], whole: Generation, workload: Workload, num_blocks: int) -> float:
    """Return the speed-up over `whole` that is possible with the same exits, by the costs of one turn.

    passes: rows → seconds of such a pass.
    """
    mean_exit = sum(map(sum, whole.exits)) / sum(map(len, whole.exits))
    per_token = whole.seconds / workload.num_tokens
    outside_layers = max(0.0, per_token - num_blocks * passes[workload.num_sequences])
    share_R = rows_of_passes(whole.exits, num_blocks)
    tied = mean_exit * tied_pass_seconds(passes, share_R, workload.num_sequences)
    return max(1.0, per_token / (tied + outside_layers))


def tied_pass_seconds(passes: Mapping[int, float], share_R: Distribution, num_streams: int) -> float:
    """Return the expected time of a tied pass of several streams, given the distribution of one stream's rows."""
    total_R = share_R
    for _ in range(num_streams - 1):
        total_R = np.convolve(total_R, share_R)
    measured = sorted(passes)
    padded = np.minimum.accumulate([passes[rows] for rows in reversed(measured)])[::-1]  # rows may be padded
    return float(total_R @ np.interp(np.arange(len(total_R)), measured, padded))


def rows_of_passes(sequences: Iterable[Sequence[int]], num_blocks: int) -> Distribution:
    """Return the share of passes with 0, 1, 2 … rows, if each sequence is served alone by tied passes."""
    counts = Counter[int]()
    for exits in sequences:
        blocks_left: list[int] = []  # of each token that has left, but has not passed all blocks
        for exit_ in exits:
            for _ in range(exit_):
                counts[1 + len(blocks_left)] += 1
                blocks_left = [left - 1 for left in blocks_left if left > 1]
            blocks_left += [num_blocks - exit_] * (exit_ < num_blocks)
    return np.array([counts[rows] for rows in range(num_blocks + 1)]) / counts.total()
