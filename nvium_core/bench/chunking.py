"""The longest gap in running streams when a long prompt arrives: prefilled in chunks, and whole."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, checked, interleaved, median_ratio
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams

NEWCOMER = "newcomer"
NEWCOMER_TOKENS = 8

Times = dict[str, list[float]]

Gap = tuple[float, float]
"""(end in seconds since the newcomer's arrival, length in seconds)."""


@dataclass(frozen=True, slots=True)
class Scene:
    """When each stream and the newcomer emitted tokens, in seconds since the newcomer's arrival."""

    token_times: Times

    @property
    def first_token_seconds(self) -> float:
        return self.token_times[NEWCOMER][0]

    @property
    def gaps(self) -> list[Gap]:
        """Gaps between consecutive tokens of a stream, sorted by end."""
        streams = [times for name, times in self.token_times.items() if name != NEWCOMER]
        return sorted((end, end - start) for times in streams for start, end in pairwise(times))

    @property
    def quiet_gaps(self) -> list[float]:
        """Those that ended before the newcomer arrived."""
        return [length for end, length in self.gaps if end <= 0]

    @property
    def disturbed_gaps(self) -> list[float]:
        """Those that overlap the time between the newcomer's arrival and its first token."""
        return [length for end, length in self.gaps if end > 0 and end - length < self.first_token_seconds]


def measure(
    subject: Subject, *, sequences: Sequence[int] = (8,), tokens: int = 32, repeats: int = 9, prompt_tokens: int = 900
) -> Figures:
    """A row for each number of streams. Each emits `tokens` tokens before the long prompt arrives."""
    prompt_tokens = min(prompt_tokens, subject.context - NEWCOMER_TOKENS)
    rows = [compare(subject, number, tokens, repeats, prompt_tokens) for number in sequences]
    return {"prompt_tokens": prompt_tokens, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, num_streams: int, num_tokens: int, repeats: int, prompt_tokens: int) -> Figures:
    whole = max(1024, prompt_tokens + num_streams)
    default = EngineConfig()
    engines = {
        "chunked": subject.engine(max_sequences=num_streams + 1),
        "whole": subject.engine(max_sequences=num_streams + 1, max_rows_per_step=whole, chunk_rows=whole),
    }
    for engine in engines.values():
        engine.calibrate()
    contenders = {
        name: partial(scene, subject, engine, num_streams, num_tokens, prompt_tokens)
        for name, engine in engines.items()
    }
    scenes = interleaved(contenders, repeats, f"{num_streams} streams")
    ways = {name: summary(turns) for name, turns in scenes.items()}
    return {
        "streams": num_streams,
        "chunk_rows": default.chunk_rows,
        "max_rows_per_step": default.max_rows_per_step,
        "ways": ways,
        "worst_gap_chunked_over_whole": _ratio(scenes, lambda scene: max(scene.disturbed_gaps)),
        "first_token_chunked_over_whole": _ratio(scenes, lambda scene: scene.first_token_seconds),
    }


def scene(subject: Subject, engine: Engine, num_streams: int, num_tokens: int, prompt_tokens: int, turn: int) -> Scene:
    """Run the streams, add the newcomer, and go on until every stream has emitted after the newcomer's first token."""
    names = [str(number) for number in range(num_streams)]
    for number, name in enumerate(names):
        limit = engine.context - len(subject.prompt)
        seed = turn * num_streams + number
        engine.add(name, subject.prompt, SamplingParams(max_tokens=limit, seed=seed, ignore_eos=True))
    token_times: Times = {name: [] for name in (*names, NEWCOMER)}
    listen(engine, token_times, lambda: min(len(token_times[name]) for name in names) > num_tokens)
    arrived = time.perf_counter()
    prompt = subject.random_tokens(prompt_tokens, turn)
    engine.add(NEWCOMER, prompt, SamplingParams(max_tokens=NEWCOMER_TOKENS, seed=turn, ignore_eos=True))
    listen(engine, token_times, lambda: all_have_answered(token_times))
    for name in token_times:
        engine.cancel(name)
    return Scene({name: [when - arrived for when in times] for name, times in token_times.items()})


def listen(engine: Engine, token_times: Times, is_over: Callable[[], bool]) -> None:
    """Record emission times until `is_over`."""
    while engine.has_work and not is_over():
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            token_times[checked(event).sequence_id].append(now)


def all_have_answered(token_times: Times) -> bool:
    """Every stream has emitted after the newcomer's first token."""
    first = token_times[NEWCOMER][:1]
    return bool(first) and all(times[-1] > first[0] for name, times in token_times.items() if name != NEWCOMER)


def summary(scenes: Sequence[Scene]) -> Figures:
    """Medians over the turns, in milliseconds; and the gaps of the last turn."""
    return {
        "first_token_ms": 1000 * median(scene.first_token_seconds for scene in scenes),
        **_spread("", [scene.disturbed_gaps for scene in scenes]),
        **_spread("quiet_", [scene.quiet_gaps for scene in scenes]),
        "gaps": [[round(1000 * end, 3), round(1000 * length, 3)] for end, length in scenes[-1].gaps],
    }


def _spread(prefix: str, gaps_by_turn: Sequence[Sequence[float]]) -> Figures:
    """Median, 99th percentile and worst of each turn's gaps, then the median over turns."""
    spread = np.median([np.percentile(gaps, [50, 99, 100]) for gaps in gaps_by_turn], axis=0)
    names = "median", "p99", "worst"
    return {f"{prefix}{name}_gap_ms": 1000 * float(value) for name, value in zip(names, spread, strict=True)}


def _ratio(scenes: Mapping[str, Sequence[Scene]], figure: Callable[[Scene], float]) -> float:
    return median_ratio(*([figure(scene) for scene in scenes[name]] for name in ("chunked", "whole")))


def table(figures: Figures) -> Table:
    names = "first_token_ms", "worst_gap_ms", "p99_gap_ms", "quiet_worst_gap_ms"
    columns = "streams", "prompt", "first token", "worst gap", "p99 gap", "worst gap before"
    result = Table(*columns, caption="Milliseconds; gaps between tokens of a stream while a prompt is taken in.")
    for row in figures["rows"]:
        for way, seen in row["ways"].items():
            result.add_row(str(row["streams"]), way, *(f"{seen[name]:.2f}" for name in names))
    return result
