"""What log-probabilities cost: throughput, time to first token, and how many tokens late they are reported.

A scored token needs every block and every exit's head. Its limit is therefore a pass that computes just these, without
the engine: rows of all sequences through all blocks, and their scores. Such passes take turns with the engine, whose
rate behind the first tokens is compared with theirs.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from statistics import mean, median

from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, Timed, interleaved, median_ratio, timed
from nvium_core.engine.device.calibration import seconds, stand_ins, whole_pass
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion, Event, TokenEvent
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence

NUM_LOGPROBS = 5

WAYS: dict[str, int | None] = {"without": None, "with": NUM_LOGPROBS}


def measure(subject: Subject, *, sequences: Items[int] = (1, 8), tokens: int = 64, repeats: int = 9) -> Figures:
    """A row for each number of sequences, of `tokens` each."""
    rows = [compare(subject, number, tokens, repeats) for number in sequences]
    return {"logprobs": NUM_LOGPROBS, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, num_sequences: int, num_tokens: int, repeats: int) -> Figures:
    engine = subject.engine(max_sequences=num_sequences, prefix_caching=False)
    engine.calibrate()
    contenders: dict[str, Callable[[int], Timed]] = {
        name: partial(run, subject, engine, num_sequences, num_tokens, logprobs) for name, logprobs in WAYS.items()
    }
    contenders["limit"] = partial(passes, engine, num_sequences, num_tokens)
    turns = interleaved(contenders, repeats, f"{num_sequences} sequences")
    rates = {name: [timing.tokens_per_second for timing in timings] for name, timings in turns.items()}
    behind_first = {name: [timing.later_tokens_per_second for timing in turns[name]] for name in WAYS}
    first = {name: [median(timing.first_token_seconds) for timing in turns[name]] for name in WAYS}
    tokens = {name: [timing.generated for timing in turns[name]] for name in WAYS}
    return {
        "sequences": num_sequences,
        **{f"tokens_per_second_{name}": median(rates[name]) for name in WAYS},
        **{f"first_token_ms_{name}": 1000 * median(values) for name, values in first.items()},
        "throughput_with_over_without": median_ratio(rates["with"], rates["without"]),
        "limit_tokens_per_second": median(rates["limit"]),
        "share_of_limit": median_ratio(behind_first["with"], rates["limit"]),
        "limit_over_without": median_ratio(rates["limit"], behind_first["without"]),
        "first_token_with_over_without": median_ratio(first["with"], first["without"]),
        "tokens_are_identical": tokens["with"] == tokens["without"],
        **delays(subject, engine, num_sequences, num_tokens),
    }


def passes(engine: Engine, num_sequences: int, num_tokens: int, turn: int) -> Timed:
    """As many scored passes as a sequence has tokens."""
    params = SamplingParams(logprobs=NUM_LOGPROBS)
    sequences = stand_ins(num_sequences, engine.pool, engine.model_config, max_sequences=num_sequences, params=params)
    step = whole_pass(sequences, engine.model_config.num_exits)
    taken = sum(seconds(engine.runner, step, turn * num_tokens + number) for number in range(num_tokens))
    for sequence in sequences:
        engine.pool.release(sequence)
    return Timed(taken, completions=[Completion(token_ids=[0] * num_tokens) for _ in sequences])


def run(
    subject: Subject, engine: Engine, num_sequences: int, num_tokens: int, logprobs: int | None, turn: int
) -> Timed:
    return timed(engine, requests(subject, num_sequences, num_tokens, logprobs, turn))


def requests(
    subject: Subject, num_sequences: int, num_tokens: int, logprobs: int | None, turn: int
) -> list[tuple[list[int], SamplingParams]]:
    """With different seeds."""
    seeds = range(turn * num_sequences, (turn + 1) * num_sequences)
    params = [SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True, logprobs=logprobs) for seed in seeds]
    return [(subject.prompt, each) for each in params]


def delays(subject: Subject, engine: Engine, num_sequences: int, num_tokens: int) -> Figures:
    """How many tokens a sequence has generated beyond the one it reports."""
    seen: list[int] = []
    timed(engine, requests(subject, num_sequences, num_tokens, NUM_LOGPROBS, turn=1), delay_counter(engine, seen))
    return {"mean_delay_tokens": mean(seen), "most_delay_tokens": max(seen)}


def delay_counter(engine: Engine, seen: list[int]) -> Callable[[list[Event]], None]:
    """To be called after each Step; appends a delay for every reported token."""
    sequences: dict[str, Sequence] = {}
    num_told: dict[str, int] = {}

    def count(events: list[Event]) -> None:
        sequences.update((sequence.id, sequence) for sequence in engine.scheduler.running)
        for event in events:
            if isinstance(event, TokenEvent) and event.sequence_id in sequences:
                told = num_told[event.sequence_id] = num_told.get(event.sequence_id, 0) + 1
                seen.append(sequences[event.sequence_id].num_generated - told)

    return count


def table(figures: Figures) -> Table:
    names = "throughput_with_over_without", "share_of_limit", "first_token_with_over_without", "mean_delay_tokens"
    columns = "sequences", "throughput", "of its limit", "first token", "mean delay in tokens"
    result = Table(*columns, caption=f"With {figures['logprobs']} log-probabilities a token, over without.")
    for row in figures["rows"]:
        result.add_row(str(row["sequences"]), *(f"{row[name]:.3f}" for name in names))
    return result
