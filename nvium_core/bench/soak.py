"""Many short requests, coming and going: is each answered once, and does anything grow or leak?

A rolling population larger than the engine has seats for, so that some always wait. Samples are taken as requests end.
"""

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, plain_table
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event, FailureEvent
from nvium_core.engine.params import SamplingParams

POPULATION, SEATS = 64, 48
SAMPLE_EVERY = 250
MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 40, 4, 24
PAGE_SIZE, CACHE_TOKENS_PER_SEAT = 2, 12
"""Less than most requests need, so that some are preempted as they grow."""

SHARED_PREFIXES, PREFIX_TOKENS = 8, 20
CANCELLED, FORKED, SCORED, SHARING = 0.12, 0.1, 0.1, 0.3
"""Shares of the requests that are cancelled, ask for two choices, ask for log-probabilities, share a prefix.

Some end before they are cancelled, about a sixth."""

MAX_CANCEL_STEPS = 40
MAX_OPEN_STEPS = 20_000
"""A request that has been open for so many Steps is stuck."""

STATM = Path("/proc/self/statm")


def measure(subject: Subject, *, requests: int = 10_000, every: int = SAMPLE_EVERY) -> Figures:
    """A sample whenever so many more requests have ended."""
    engine = subject.engine(max_sequences=SEATS, page_size=PAGE_SIZE, cache_tokens=CACHE_TOKENS_PER_SEAT * SEATS)
    crowd = Crowd(subject, engine, requests)
    samples = [sample(engine, 0)]
    for num_ended in track(crowd.run(), "soaking", total=requests, transient=True):
        if num_ended % every == 0:
            engine.check_integrity()
            samples.append(sample(engine, num_ended))
    engine.check_integrity()
    later = [each for each in samples if each["requests"] >= requests / 2]
    return {
        "requests": requests,
        **crowd.counts,
        "is_sound": crowd.is_sound,
        "preemptions": engine.scheduler.num_preemptions,
        "rows_found": engine.pool.num_rows_found,
        "resident_bytes_per_request": slope(later, "resident_bytes"),
        "objects_per_request": slope(later, "objects"),
        "samples": samples,
    }


@dataclass(slots=True)
class Open:
    """A request that is being served. `endings` counts, by choice, how often an end was told."""

    began_step: int
    cancel_step: int | None
    endings: dict[int, int]
    has_failed: bool = False

    @property
    def is_over(self) -> bool:
        return all(self.endings.values())


@dataclass(slots=True)
class Tally:
    """What became of the requests: each of them is one of the first four."""

    answered_once: int = 0
    cancelled: int = 0
    failed: int = 0
    stuck: int = 0
    told_after_the_end: int = 0
    tokens: int = 0
    choices: int = 0
    scored_tokens: int = 0


class Crowd:
    """Keeps the population up, cancels some, and checks what is told."""

    def __init__(self, subject: Subject, engine: Engine, num_requests: int) -> None:
        self._subject = subject
        self._engine = engine
        self._num_requests = num_requests
        self._draws = random.Random(0)
        self._open: dict[str, Open] = {}
        self._num_added = 0
        self._num_steps = 0
        self._tally = Tally()

    @property
    def counts(self) -> Figures:
        tally = {name: getattr(self._tally, name) for name in Tally.__slots__}
        leaked = self._engine.pool.num_pages - self._engine.pool.num_free
        return {**tally, "leaked_pages": leaked, "steps": self._num_steps}

    @property
    def is_sound(self) -> bool:
        """All were answered once or cancelled, and nothing is left behind."""
        counts = self.counts
        all_served = counts["answered_once"] + counts["cancelled"] == self._num_requests
        return all_served and counts["told_after_the_end"] == counts["leaked_pages"] == 0

    def run(self) -> Iterator[int]:
        """Serve all; yields how many have ended, one by one."""
        num_ended = 0
        while self._open or self._num_added < self._num_requests:
            self._fill_up()
            for event in self._engine.step():
                self._hear(event)
            self._num_steps += 1
            for _ in range(self._let_go()):
                num_ended += 1
                yield num_ended

    def _fill_up(self) -> None:
        while len(self._open) < POPULATION and self._num_added < self._num_requests:
            params = self._params()
            name = str(self._num_added)
            self._engine.add(name, self._prompt(), params)
            is_to_go = self._draws.random() < CANCELLED
            cancel_step = self._num_steps + self._draws.randint(0, MAX_CANCEL_STEPS) if is_to_go else None
            self._open[name] = Open(self._num_steps, cancel_step, dict.fromkeys(range(params.n), 0))
            self._num_added += 1
            self._tally.choices += params.n

    def _params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._draws.randint(1, MAX_ANSWER_TOKENS),
            n=2 if self._draws.random() < FORKED else 1,
            logprobs=2 if self._draws.random() < SCORED else None,
            seed=self._num_added,
        )

    def _prompt(self) -> list[int]:
        length = self._draws.randint(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
        prompt = self._subject.random_tokens(length, self._num_added)
        if self._draws.random() < SHARING:
            shared = self._draws.randrange(SHARED_PREFIXES)
            prompt = (self._subject.random_tokens(PREFIX_TOKENS, f"prefix {shared}") + prompt)[:MAX_PROMPT_TOKENS]
        return prompt

    def _hear(self, event: Event) -> None:
        request = self._open.get(event.sequence_id)
        if request is None or request.endings[event.choice]:
            self._tally.told_after_the_end += 1
        elif isinstance(event, FailureEvent):
            request.has_failed = True
            request.endings[event.choice] += 1
        else:
            self._tally.tokens += 1
            self._tally.scored_tokens += getattr(event, "score", None) is not None
            request.endings[event.choice] += event.finish_reason is not None

    def _let_go(self) -> int:
        """Close what is over, cancel whose time has come, give up what is stuck; how many are gone."""
        gone = [name for name, request in self._open.items() if self._close(name, request)]
        for name in gone:
            del self._open[name]
        return len(gone)

    def _close(self, name: str, request: Open) -> bool:
        tally = self._tally
        is_stuck = self._num_steps - request.began_step > MAX_OPEN_STEPS or not self._engine.has_work
        if request.is_over:
            tally.failed += request.has_failed
            tally.answered_once += not request.has_failed
        elif request.cancel_step is not None and self._num_steps >= request.cancel_step:
            tally.cancelled += 1
            self._engine.cancel(name)
        elif is_stuck:
            tally.stuck += 1
            self._engine.cancel(name)
        else:
            return False
        return True


def sample(engine: Engine, num_requests: int) -> Figures:
    """Resident memory and living Python objects, garbage collected."""
    gc.collect()
    return {
        "requests": num_requests,
        "resident_bytes": int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "cache_usage": engine.pool.usage,
    }


def slope(samples: list[Figures], name: str) -> float:
    """Growth per request, by least squares; 0 of a single sample."""
    if len(samples) < 2:
        return 0.0
    requests, values = ([each[key] for each in samples] for key in ("requests", name))
    return float(np.polyfit(requests, values, 1)[0])


def table(figures: Figures) -> Table:
    return plain_table(figures)
