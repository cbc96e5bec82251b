"""Measure the effect of one feature of the engine: `python -m research.features prefix`.

Each measurement is a ratio of the engine with the feature to the engine without it.

- prefix: time to first token if the prompt's prefix is cached
- chunks: longest gap in running streams during the prefill of a long prompt in chunks
- logprobs: tokens per second with log-probabilities
- deterministic: tokens per second with `deterministic`; also how many tokens change if the requests share a batch
- drafts: tokens per second of sampling `original` with drafts
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio, timed
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams
from research.measuring import checked, engine_of, load, parser, report, requests, seeds

PREFIX_TOKENS, TAIL_TOKENS = 400, 8
NUM_LOGPROBS = 5
NEWCOMER, NEWCOMER_TOKENS = "newcomer", 8


def prefix(subject: Subject, sequences: int, tokens: int, repeats: int) -> Figures:
    """Measure the time to first token of a prompt that shares a prefix with the previous prompt."""
    length = min(PREFIX_TOKENS, subject.context - TAIL_TOKENS - tokens)
    engines = {
        name: engine_of(subject, max_sequences=sequences, prefix_caching=is_cached)
        for name, is_cached in {"cached": True, "uncached": False}.items()
    }

    def second(engine: Engine, turn: int) -> float:
        shared = random_tokens(subject, length, turn)
        for tail in range(2):
            prompt = shared + random_tokens(subject, TAIL_TOKENS, f"{turn} {tail}")
            run = timed(engine, [(prompt, SamplingParams(max_tokens=tokens, seed=turn, ignore_eos=True))])
        return run.first_token_seconds[0]

    return compared({name: partial(second, engine) for name, engine in engines.items()}, repeats, "first_token_seconds")


def chunks(subject: Subject, sequences: int, tokens: int, repeats: int) -> Figures:
    """Measure the longest gap between tokens of running streams while a long prompt is processed."""
    length = subject.context - NEWCOMER_TOKENS
    engines = {
        "chunked": engine_of(subject, max_sequences=sequences + 1),
        "whole": engine_of(subject, max_sequences=sequences + 1, max_rows_per_step=length + 1, chunk_rows=length + 1),
    }

    def worst_gap(engine: Engine, turn: int) -> float:
        times: dict[str, list[float]] = {str(number): [] for number in range(sequences)}
        for name, seed in zip(times, seeds(turn, sequences), strict=True):
            limit = engine.context - len(subject.prompt)
            engine.add(name, subject.prompt, SamplingParams(max_tokens=limit, seed=seed, ignore_eos=True))
        listen(engine, times, lambda: min(map(len, times.values())) > tokens)
        times[NEWCOMER] = []
        prompt = random_tokens(subject, length, turn)
        engine.add(NEWCOMER, prompt, SamplingParams(max_tokens=NEWCOMER_TOKENS, seed=turn, ignore_eos=True))
        arrived = time.perf_counter()
        listen(engine, times, lambda: all(each and each[-1] > arrived for each in times.values()))
        first = times.pop(NEWCOMER)[0]
        for name in (*times, NEWCOMER):
            engine.cancel(name)
        gaps = [pair for stream in times.values() for pair in pairwise(stream)]
        return max(end - start for start, end in gaps if end > arrived and start < first)

    return compared({name: partial(worst_gap, each) for name, each in engines.items()}, repeats, "worst_gap_seconds")


def random_tokens(subject: Subject, count: int, seed: object) -> list[int]:
    draws = random.Random(str(seed))
    return [draws.randrange(subject.model.config.vocab_size) for _ in range(count)]


def listen(engine: Engine, times: Mapping[str, list[float]], is_over: Callable[[], bool]) -> None:
    """Run the engine and record the time of each token until `is_over` returns True."""
    while engine.has_work and not is_over():
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            times[checked(event).request_id].append(now)


def logprobs(subject: Subject, sequences: int, tokens: int, repeats: int) -> Figures:
    engine = engine_of(subject, max_sequences=sequences, prefix_caching=False)
    plain = SamplingParams(max_tokens=tokens, ignore_eos=True)
    variants = {"with": replace(plain, logprobs=NUM_LOGPROBS), "without": plain}
    contenders = {name: partial(rate, subject, engine, sequences, params) for name, params in variants.items()}
    return compared(contenders, repeats, "tokens_per_second")


def deterministic(subject: Subject, sequences: int, tokens: int, repeats: int) -> Figures:
    engines = {
        name: engine_of(subject, max_sequences=sequences, deterministic=is_fixed, prefix_caching=False)
        for name, is_fixed in {"deterministic": True, "default": False}.items()
    }
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    contenders = {name: partial(rate, subject, engine, sequences, params) for name, engine in engines.items()}
    found = compared(contenders, repeats, "tokens_per_second")
    sent = requests(subject.prompt, [replace(params, seed=seed) for seed in range(sequences)])
    for name, engine in engines.items():
        alone = [timed(engine, [each]).token_ids[0] for each in sent]
        together = timed(engine, sent).token_ids
        found[f"{name}_differing_tokens"] = num_differing(alone, together)
    return found


def drafts(subject: Subject, sequences: int, tokens: int, repeats: int) -> Figures:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, sampling="original")
    contenders = {
        name: partial(rate, subject, engine_of(subject, max_sequences=sequences, **config), sequences, params)
        for name, config in {"drafted": {}, "undrafted": {"max_drafts": 0}}.items()
    }
    return compared(contenders, repeats, "tokens_per_second")


def rate(subject: Subject, engine: Engine, number: int, params: SamplingParams, turn: int) -> float:
    """Measure tokens per second, prefill included."""
    run = timed(engine, requests(subject.prompt, [replace(params, seed=seed) for seed in seeds(turn, number)]))
    return run.tokens_per_second


def num_differing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    return sum(a != b for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True))


def compared(contenders: Mapping[str, Callable[[int], float]], repeats: int, unit: str) -> Figures:
    """Return the median of each of two contenders, and the median ratio of the first to the second contender."""
    turns = interleaved(contenders, repeats, unit)
    first, second = turns
    medians = {f"{name}_{unit}": median(values) for name, values in turns.items()}
    return {**medians, f"{first}_over_{second}": median_ratio(turns[first], turns[second])}


FEATURES = {each.__name__: each for each in (prefix, chunks, logprobs, deterministic, drafts)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("features", __doc__)
    options.add_argument("feature", choices=FEATURES)
    options.add_argument("--sequences", type=int, default=8, help="concurrent sequences [8]")
    options.add_argument("--tokens", type=int, default=48, help="tokens per sequence [48]")
    args = options.parse_args(arguments)
    subject = load(args)
    figures = FEATURES[args.feature](subject, args.sequences, args.tokens, args.repeats)
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}")
    report(subject, {"feature": args.feature, **figures}, table, args.json)


if __name__ == "__main__":
    main()
