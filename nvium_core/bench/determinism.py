"""How many tokens differ between a request alone and in a batch, with `deterministic` and without; and what it costs.

Batches vary as much as possible: several sizes, prompts in small chunks, shared prefixes found in the cache, and a
cache too small for all, so that sequences are preempted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import (
    Figures,
    Request,
    Subject,
    Timed,
    interleaved,
    median_ratio,
    num_differing,
    timed,
)
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event
from nvium_core.engine.params import SamplingParams

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 5, 120
MIN_ANSWER_TOKENS = 8
PREFIX_TOKENS = 48
SHARED_PREFIXES = 2
SHARING = 0.4
"""Share of requests that begin with one of the shared prefixes."""

GROUP_SIZES = (1, 4, 16)
PAGE_SIZE, CHUNK_ROWS, MAX_ROWS = 4, 24, 96
CACHE_SHARE = 0.5
"""Of what a group needs on average; the longest request always fits."""

TASTES: list[dict[str, Any]] = [{}, {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}]

MODES = {"deterministic": True, "default": False}


def measure(
    subject: Subject, *, requests: int = 64, sequences: Sequence[int] = (1, 8), tokens: int = 48, repeats: int = 5
) -> Figures:
    """Answers have at most `tokens`; the cost is measured for each number of `sequences`."""
    asked = mixed_requests(subject, requests, tokens)
    return {
        "requests": requests,
        "tokens": tokens,
        "repeats": repeats,
        "answer_tokens": sum(params.max_tokens for _, params in asked),
        "modes": {name: differences(subject, asked, is_fixed) for name, is_fixed in MODES.items()},
        "cost": [cost(subject, number, tokens, repeats) for number in sequences],
    }


def mixed_requests(subject: Subject, count: int, longest_answer: int) -> list[Request]:
    """All lengths that the context allows; some share a prefix, some are greedy, some truncated."""
    draws = random.Random(0)
    longest_answer = min(longest_answer, subject.context // 2)
    longest_prompt = min(MAX_PROMPT_TOKENS, subject.context - longest_answer)
    requests = []
    for number in range(count):
        prompt = subject.random_tokens(draws.randint(min(MIN_PROMPT_TOKENS, longest_prompt), longest_prompt), number)
        if draws.random() < SHARING:
            shared = subject.random_tokens(PREFIX_TOKENS, f"prefix {number % SHARED_PREFIXES}")
            prompt = (shared + prompt)[:longest_prompt]
        num_tokens = draws.randint(min(MIN_ANSWER_TOKENS, longest_answer), longest_answer)
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
        requests.append((prompt, replace(params, **draws.choice(TASTES))))
    return requests


def differences(subject: Subject, requests: Sequence[Request], is_deterministic: bool) -> Figures:
    """Differences to each request alone on a fresh engine, for batches of 1, 4, 16 and all."""
    mode = "deterministic" if is_deterministic else "default"
    expected = [
        alone(subject, request, is_deterministic) for request in track(requests, f"{mode}, alone", transient=True)
    ]
    sizes = [*(size for size in GROUP_SIZES if size < len(requests)), len(requests)]
    groups = [
        in_company(subject, requests, size, is_deterministic, expected)
        for size in track(sizes, f"{mode}, in company", transient=True)
    ]
    sums = ("differing_tokens", "differing_exits", "preemptions", "rows_found", "chunks")
    return {**{name: sum(group[name] for group in groups) for name in sums}, "groups": groups}


def alone(subject: Subject, request: Request, is_deterministic: bool) -> Timed:
    num_positions = len(request[0]) + request[1].max_tokens
    engine = subject.engine(
        max_sequences=1, cache_tokens=num_positions, prefix_caching=False, deterministic=is_deterministic
    )
    return timed(engine, [request])


def in_company(
    subject: Subject, requests: Sequence[Request], size: int, is_deterministic: bool, expected: Sequence[Timed]
) -> Figures:
    """All requests, `size` at a time."""
    engine = subject.engine(
        max_sequences=size,
        max_rows_per_step=MAX_ROWS,
        chunk_rows=CHUNK_ROWS,
        page_size=PAGE_SIZE,
        cache_tokens=scarce_tokens(requests, size),
        deterministic=is_deterministic,
    )
    chunks = ChunkCounter(engine)
    seen = timed(engine, requests, chunks.count)
    wanted = [completion for timing in expected for completion in timing.completions]
    return {
        "at_a_time": size,
        "differing_tokens": num_differing([c.token_ids for c in seen.completions], [c.token_ids for c in wanted]),
        "differing_exits": num_differing([c.exits for c in seen.completions], [c.exits for c in wanted]),
        "preemptions": engine.scheduler.num_preemptions,
        "rows_found": engine.pool.num_rows_found,
        "chunks": chunks.num_chunks,
    }


def scarce_tokens(requests: Sequence[Request], size: int) -> int:
    """Room for the longest request, and for a part of what `size` requests need."""
    needs = [len(prompt) + params.max_tokens for prompt, params in requests]
    return max(*needs, int(CACHE_SHARE * size * mean(needs))) + PAGE_SIZE


@dataclass(slots=True)
class ChunkCounter:
    """Counts Steps that leave a prompt partly prefilled."""

    engine: Engine
    num_chunks: int = 0

    def count(self, _: list[Event]) -> None:
        running = self.engine.scheduler.running
        self.num_chunks += any(s.filled[-1] < s.filled[0] < s.num_prompt_tokens for s in running)


def cost(subject: Subject, num_sequences: int, num_tokens: int, repeats: int) -> Figures:
    """Tokens per second with `deterministic` over those without."""
    engines = {
        name: subject.engine(max_sequences=num_sequences, deterministic=is_fixed) for name, is_fixed in MODES.items()
    }
    for engine in engines.values():
        engine.calibrate()
    contenders = {name: partial(rate, subject, engine, num_sequences, num_tokens) for name, engine in engines.items()}
    rates = interleaved(contenders, repeats, f"{num_sequences} sequences")
    return {
        "sequences": num_sequences,
        **{f"{name}_tokens_per_second": median(values) for name, values in rates.items()},
        "deterministic_over_default": median_ratio(rates["deterministic"], rates["default"]),
    }


def rate(subject: Subject, engine: Engine, num_sequences: int, num_tokens: int, turn: int) -> float:
    seeds = range(turn * num_sequences, (turn + 1) * num_sequences)
    params = [SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True) for seed in seeds]
    return timed(engine, [(subject.prompt, each) for each in params]).tokens_per_second


def table(figures: Figures) -> Table:
    columns = "mode", "at a time", "tokens", "exits", "preempted", "found", "chunks"
    names = "at_a_time", "differing_tokens", "differing_exits", "preemptions", "rows_found", "chunks"
    costs = (f"{row['deterministic_over_default']:.3f} at {row['sequences']}" for row in figures["cost"])
    result = Table(*columns, caption=f"Tokens and exits that differ. Speed over default: {', '.join(costs)}.")
    for mode, seen in figures["modes"].items():
        for group in seen["groups"]:
            result.add_row(mode, *(str(group[name]) for name in names))
    return result
