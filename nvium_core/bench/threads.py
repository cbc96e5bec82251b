"""Numbers of threads for native calls, each fixed, beside what calibration chooses, in turns on one engine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio, timed
from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams, require


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8), tokens: int = 64, repeats: int = 7) -> Figures:
    """A row for each number of sequences, of `tokens` each; numbers of threads up to PyTorch's."""
    return {
        "tokens": tokens,
        "repeats": repeats,
        "rows": [compare(subject, number, tokens, repeats) for number in sequences],
    }


def compare(subject: Subject, num_sequences: int, num_tokens: int, repeats: int) -> Figures:
    engine = subject.engine(max_sequences=num_sequences, prefix_caching=False)
    backend = engine.runner.backend
    require(
        isinstance(backend, NativeBackend), "experiment", "threads are of native calls, which this model has none of"
    )
    assert isinstance(backend, NativeBackend)
    engine.calibrate()
    ways = {"auto": replace(backend.threads)}
    ways |= {str(number): Threads(number, number) for number in range(1, torch.get_num_threads() + 1)}
    contenders = {
        name: partial(run, subject, engine, threads, num_sequences, num_tokens) for name, threads in ways.items()
    }
    turns = interleaved(contenders, repeats, f"{num_sequences} sequences")
    best = max(ways.keys() - {"auto"}, key=lambda name: median(turns[name]))
    return {
        "sequences": num_sequences,
        "chosen": {"few": ways["auto"].few, "many": ways["auto"].many},
        "tokens_per_second": {name: median(rates) for name, rates in turns.items()},
        "over_one": {name: median_ratio(rates, turns["1"]) for name, rates in turns.items()},
        "best": best,
        "auto_over_best": median_ratio(turns["auto"], turns[best]),
    }


def run(subject: Subject, engine: Engine, threads: Threads, num_sequences: int, num_tokens: int, turn: int) -> float:
    """Tokens per second."""
    assert isinstance(engine.runner.backend, NativeBackend)
    engine.runner.backend.threads.few, engine.runner.backend.threads.many = threads.few, threads.many
    seeds = range(turn * num_sequences, (turn + 1) * num_sequences)
    asked = [(subject.prompt, SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)) for seed in seeds]
    return timed(engine, asked).tokens_per_second


def table(figures: Figures) -> Table:
    result = Table("sequences", "threads", "tokens/s", "over one", caption="auto is what calibration chooses.")
    for row in figures["rows"]:
        for name, rate in row["tokens_per_second"].items():
            result.add_row(str(row["sequences"]), name, f"{rate:.1f}", f"{row['over_one'][name]:.2f}")
    return result
