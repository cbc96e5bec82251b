"""The engine without a model: the real scheduler, exits drawn from a routing, and measured costs as the clock.

No prefix is cached, and pages never run out. A sequence's exits depend on the seed and its number only, so policies are
compared on the same work.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import Policy
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step
from nvium_core.planning.machine import Machine

TOKENS_PER_SEQUENCE = 256
"""In the closed loop."""

WARM_UP_SHARE = 0.1
ENDLESS = 2**40
"""Positions in a page: one holds any sequence."""


class Ran(NamedTuple):
    """A Step, when it began in seconds, and the sequences whose front exits."""

    step: Step
    began: float
    leaving: list[Sequence]


class Simulator:
    """A scheduler whose Steps take their costs. Seconds count from 0."""

    def __init__(self, machine: Machine, policy: Policy | None = None, seed: int = 0) -> None:
        self.machine = machine
        self.now = 0.0
        self.num_steps = 0
        config = machine.config
        pool = PagePool(2 * config.max_sequences, ENDLESS, keeps_pages=False)
        self.scheduler = Scheduler(policy or machine.policy(), pool, config, num_blocks=machine.costs.num_blocks)
        self._seed = seed
        self._num_added = 0
        self._exit_probabilities = machine.exit_probabilities
        self._draws: dict[Sequence, random.Random] = {}

    def add(self, num_prompt_tokens: int) -> Sequence:
        number = self._num_added
        self._num_added += 1
        sequence = Sequence(
            str(number),
            [0] * num_prompt_tokens,
            SamplingParams(),
            seed=0,
            num_blocks=self.scheduler.num_blocks,
            arrival=number,
        )
        self._draws[sequence] = random.Random(f"{self._seed} {number}")
        self.scheduler.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._draws[sequence]

    def step(self) -> Iterator[Ran]:
        """Run the next Step and those the engine would run with it; there must be work.

        The caller must `emit` the tokens of `leaving` before it takes the next.
        """
        step, follows = self.scheduler.schedule(), False
        assert step is not None
        while step is not None:
            ran = self._run(step, follows)
            yield ran
            goes_on = step.goes_on_anyway or not ran.leaving
            step, follows = self._remaining(step.following) if goes_on else None, True

    def _remaining(self, step: Step | None) -> Step | None:
        """The Step without sequences that have finished."""
        runs = [run for run in step.runs if run.sequence in self._draws] if step else []
        return replace(step, runs=runs) if step and runs else None

    def emit(self, sequence: Sequence) -> float:
        """Append a token; returns its time."""
        sequence.append(0)
        self.now += self.machine.http_token_seconds
        return self.now

    def _run(self, step: Step, follows: bool) -> Ran:
        """Advance the clock by a Step."""
        asked = [run.sequence for run in step.runs if run.rows.stop == run.sequence.num_tokens]
        probability, began = self._exit_probabilities[step.block], self.now
        leaving = [sequence for sequence in asked if self._draws[sequence].random() < probability]
        seconds = self._seconds(step, len(asked), follows) / self.machine.http_share
        self.now += seconds
        self.num_steps += 1
        counts = {"num_rows": step.num_rows, "num_asked": len(asked), "num_left": len(leaving)}
        self.scheduler.policy.observe(step.block, seconds=seconds, follows=follows, **counts)
        for run in step.runs:
            run.sequence.advance(step.block, run.rows)
        return Ran(step, began, leaving)

    def _seconds(self, step: Step, num_asked: int, follows: bool) -> float:
        """Of a Step. A Step of a pass takes an equal share of it, if passes were measured."""
        costs = self.machine.costs
        if step.goes_on_anyway and costs.passes:
            return costs.pass_seconds(step.num_rows) / costs.num_blocks
        cost = costs.seconds_following if follows else costs.seconds
        return cost(step.block, step.num_rows, num_asked)


@dataclass(slots=True)
class Request:
    """When it was due and its lengths; when its first and last token came, in seconds."""

    due: float
    num_prompt_tokens: int
    num_tokens: int
    first: float = math.nan
    last: float = math.nan

    @property
    def first_token(self) -> float:
        return self.first - self.due

    @property
    def between_tokens(self) -> float:
        """On average; 0 for a single token."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)

    @property
    def total(self) -> float:
        return self.last - self.due


def serve(machine: Machine, requests: Iterable[Request], seed: int = 0) -> None:
    """Fill in when tokens came. Requests must be sorted by `due`."""
    simulator = Simulator(machine, seed=seed)
    open_requests: dict[Sequence, Request] = {}
    waiting = iter(requests)
    following = next(waiting, None)
    while following is not None or open_requests:
        if not open_requests and following is not None:
            simulator.now = max(simulator.now, following.due)
        while following is not None and following.due <= simulator.now:
            open_requests[simulator.add(following.num_prompt_tokens)] = following
            simulator.now += machine.http_request_seconds
            following = next(waiting, None)
        for ran in simulator.step():
            for sequence in ran.leaving:
                _answer(simulator, sequence, open_requests)


def _answer(simulator: Simulator, sequence: Sequence, open_requests: dict[Sequence, Request]) -> None:
    request, now = open_requests[sequence], simulator.emit(sequence)
    if sequence.num_generated == 1:
        request.first = now
    if sequence.num_generated == request.num_tokens:
        request.last = now
        simulator.remove(sequence)
        del open_requests[sequence]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A policy's results. A wait is from ready to run, a gap from a sequence's token to its next."""

    tokens_per_second: float
    mean_wait_steps: float
    p99_wait_steps: float
    max_wait_steps: float
    mean_wait_seconds: float
    p99_wait_seconds: float
    max_wait_seconds: float
    p50_gap_seconds: float
    p99_gap_seconds: float
    max_gap_seconds: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(slots=True)
class Record:
    """Measurements since the warm-up."""

    began: float
    num_tokens: int = 0
    wait_steps: list[int] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)

    def figures(self, now: float) -> Figures:
        steps, seconds, gaps = (_spread(each) for each in (self.wait_steps, self.wait_seconds, self.gap_seconds))
        return Figures(
            tokens_per_second=self.num_tokens / (now - self.began),
            mean_wait_steps=steps[0],
            p99_wait_steps=steps[2],
            max_wait_steps=steps[3],
            mean_wait_seconds=seconds[0],
            p99_wait_seconds=seconds[2],
            max_wait_seconds=seconds[3],
            p50_gap_seconds=gaps[1],
            p99_gap_seconds=gaps[2],
            max_gap_seconds=gaps[3],
        )


class ClosedLoop:
    """Every seat taken: a finished sequence is replaced at once. Prompts are one token long."""

    def __init__(self, machine: Machine, policy: Policy, seed: int) -> None:
        self.simulator = Simulator(machine, policy, seed)
        self._ready: dict[Sequence, tuple[int, float]] = {}
        """The Step and second since which a sequence waits for its next block."""
        self._emitted: dict[Sequence, float] = {}
        for _ in range(machine.config.max_sequences):
            self._arrive()

    def run(self, num_tokens: int) -> Record:
        """Until `num_tokens` tokens have been emitted."""
        record = Record(self.simulator.now)
        while record.num_tokens < num_tokens:
            self._step(record)
        return record

    def _step(self, record: Record) -> None:
        simulator = self.simulator
        for step, began, leaving in simulator.step():
            for run in step.runs:
                since_step, since = self._ready[run.sequence]
                record.wait_steps.append(simulator.num_steps - 1 - since_step)
                record.wait_seconds.append(began - since)
            for sequence in leaving:
                self._emit(sequence, record)
            for run in step.runs:
                if run.sequence in self._ready:
                    self._ready[run.sequence] = simulator.num_steps, simulator.now

    def _emit(self, sequence: Sequence, record: Record) -> None:
        now = self.simulator.emit(sequence)
        record.num_tokens += 1
        if sequence in self._emitted:
            record.gap_seconds.append(now - self._emitted[sequence])
        self._emitted[sequence] = now
        if sequence.num_generated == TOKENS_PER_SEQUENCE:
            self.simulator.remove(sequence)
            del self._ready[sequence], self._emitted[sequence]
            self._arrive()

    def _arrive(self) -> None:
        self._ready[self.simulator.add(1)] = self.simulator.num_steps, self.simulator.now


def simulate(machine: Machine, policy: Policy, *, num_tokens: int = 20_000, seed: int = 0) -> Figures:
    """With every seat taken, after a warm-up."""
    loop = ClosedLoop(machine, policy, seed)
    loop.run(round(num_tokens * WARM_UP_SHARE))
    return loop.run(num_tokens).figures(loop.simulator.now)


def _spread(values: Iterable[float]) -> tuple[float, ...]:
    """Mean, median, 99th percentile, maximum."""
    seen = np.fromiter(values, float)
    return float(seen.mean()), *map(float, np.percentile(seen, [50, 99, 100]))
