"""Tokens per second of the engine in this process, prefill included: the reference for a server's figures."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, take_turns, timed
from nvium_core.engine.params import SamplingParams


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8, 32), tokens: int = 128, repeats: int = 3) -> Figures:
    """A row for each number of sequences, of `tokens` each, started together."""
    rows = [rate(subject, number, tokens, repeats) for number in sequences]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def rate(subject: Subject, num_sequences: int, num_tokens: int, repeats: int) -> Figures:
    engine = subject.engine(max_sequences=max(32, num_sequences))
    engine.calibrate()

    def turn(number: int) -> float:
        seeds = range(number * num_sequences, (number + 1) * num_sequences)
        params = [SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True) for seed in seeds]
        return timed(engine, [(subject.prompt, each) for each in params]).tokens_per_second

    rates = take_turns(turn, repeats, f"{num_sequences} sequences")
    return {"sequences": num_sequences, "tokens_per_second": median(rates)}


def table(figures: Figures) -> Table:
    result = Table("sequences", "tokens/s", caption=f"{figures['tokens']} tokens each.")
    for row in figures["rows"]:
        result.add_row(str(row["sequences"]), f"{row['tokens_per_second']:.1f}")
    return result
