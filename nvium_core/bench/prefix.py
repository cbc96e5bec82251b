"""What a cached prefix saves: time to first token, cold and warm; and one prompt with four choices against four
prompts.

Every turn has a new prefix. One engine meets it twice; another, without prefix caching, once.
"""

from dataclasses import replace
from statistics import median

from rich.table import Table

from nvium_core.bench.harness import (
    Figures,
    Subject,
    Timed,
    interleaved,
    median_ratio,
    num_differing,
    plain_table,
    take_turns,
    timed,
)
from nvium_core.engine.params import SamplingParams, require

PREFIX_TOKENS, TAIL_TOKENS = 400, 8
NUM_CHOICES = 4


def measure(subject: Subject, *, tokens: int = 16, repeats: int = 9, prefix_tokens: int = PREFIX_TOKENS) -> Figures:
    """Answers have `tokens`. Outputs are compared with those of the engine without prefix caching."""
    room = subject.context - prefix_tokens - TAIL_TOKENS
    require(tokens <= room, "tokens", f"after a prefix of {prefix_tokens} there is room for {room}, got {tokens}")
    return {
        "prefix_tokens": prefix_tokens,
        "tokens": tokens,
        "repeats": repeats,
        **first_tokens(subject, prefix_tokens, tokens, repeats),
        **choices(subject, prefix_tokens, tokens, repeats),
    }


def first_tokens(subject: Subject, prefix_tokens: int, num_tokens: int, repeats: int) -> Figures:
    """Of a new prefix (cold), of the same prefix with another tail (warm), and of that without prefix caching."""
    keeping = subject.engine(max_sequences=1)
    forgetting = subject.engine(max_sequences=1, prefix_caching=False)

    def turn(number: int) -> dict[str, Timed]:
        prefix = subject.random_tokens(prefix_tokens, number)
        first, second = (prefix + subject.random_tokens(TAIL_TOKENS, f"{number} {tail}") for tail in range(2))
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
        runs = {"cold": (keeping, first), "warm": (keeping, second), "uncached": (forgetting, second)}
        return {name: timed(engine, [(prompt, params)]) for name, (engine, prompt) in runs.items()}

    turns = take_turns(turn, repeats, "prefixes")
    seconds = {name: [runs[name].first_token_seconds[0] for runs in turns] for name in turns[0]}
    return {
        **{f"{name}_first_token_ms": 1000 * median(values) for name, values in seconds.items()},
        "warm_over_cold": median_ratio(seconds["warm"], seconds["cold"]),
        "warm_over_uncached": median_ratio(seconds["warm"], seconds["uncached"]),
        "rows_found": keeping.pool.num_rows_found,
        **agreement("warm", [(runs["warm"], runs["uncached"]) for runs in turns]),
    }


def choices(subject: Subject, prefix_tokens: int, num_tokens: int, repeats: int) -> Figures:
    """Seconds until all choices are complete: one request for four choices, and four requests that share nothing."""
    forking = subject.engine(max_sequences=NUM_CHOICES)
    forgetting = subject.engine(max_sequences=NUM_CHOICES, prefix_caching=False)

    def forked(number: int) -> Timed:
        return timed(forking, [(prompt(number), replace(params(number), n=NUM_CHOICES))])

    def separate(number: int) -> Timed:
        alternatives = [replace(params(number), choice=choice) for choice in range(NUM_CHOICES)]
        return timed(forgetting, [(prompt(number), alternative) for alternative in alternatives])

    def prompt(number: int) -> list[int]:
        return subject.random_tokens(prefix_tokens + TAIL_TOKENS, f"choices {number}")

    def params(number: int) -> SamplingParams:
        return SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)

    runs = interleaved({"forked": forked, "separate": separate}, repeats, "choices")
    seconds = {name: [run.seconds for run in turns] for name, turns in runs.items()}
    first = {name: [median(run.first_token_seconds) for run in turns] for name, turns in runs.items()}
    return {
        **{f"{name}_seconds": median(values) for name, values in seconds.items()},
        "forked_over_separate": median_ratio(seconds["forked"], seconds["separate"]),
        "forked_over_separate_first_token": median_ratio(first["forked"], first["separate"]),
        **agreement("forked", list(zip(runs["forked"], runs["separate"], strict=True))),
    }


def agreement(name: str, pairs: list[tuple[Timed, Timed]]) -> Figures:
    """Whether tokens and exits are the same, and how many differ."""
    generated, expected = (
        [completion for pair in pairs for completion in pair[place].completions] for place in range(2)
    )
    tokens = num_differing([c.token_ids for c in generated], [c.token_ids for c in expected])
    exits = num_differing([c.exits for c in generated], [c.exits for c in expected])
    return {
        f"{name}_outputs_are_identical": tokens == exits == 0,
        f"{name}_differing_tokens": tokens,
        f"{name}_differing_exits": exits,
    }


def table(figures: Figures) -> Table:
    return plain_table(figures)
