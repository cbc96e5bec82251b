"""Schedules without a model: real staircases and the engine's own policies, moved by drawn exits and given costs.

A closed loop: a sequence that has all its tokens is replaced at once. Prompts are one token long and free to admit.
A sequence's exits are the same whatever the policy, so that policies are compared on the same work. Needs no torch.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import exit_probabilities
from nvium_core.engine.schedule.policies import Policy, Sweep, Synchronous
from nvium_core.engine.schedule.policies.optimal import solved
from nvium_core.engine.schedule.policies.problem import Problem
from nvium_core.engine.schedule.policies.tuning import tune
from nvium_core.engine.schedule.sequence import Sequence as Staircase

TOKENS_PER_SEQUENCE = 256
WARM_UP_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of a machine: how deep tokens go, what blocks cost, how many sequences there are.

    `routing` is p_k for every block. `head_seconds` is paid for every token. A sequence that has been ready for
    `max_wait_steps` steps has its block run next, as in the engine.
    """

    routing: tuple[float, ...]
    costs: StepCosts
    num_sequences: int
    head_seconds: float = 0.0
    max_wait_steps: int = EngineConfig().max_wait_steps

    def __post_init__(self) -> None:
        is_distribution = min(self.routing, default=-1) >= 0 and abs(sum(self.routing) - 1) <= 0.01
        require(is_distribution, "routing", f"probabilities must be at least 0 and sum to 1, got {self.routing}")
        blocks, exits = self.costs.num_blocks, len(self.routing)
        require(blocks == exits, "costs", f"are given for {blocks} blocks, the routing for {exits}")
        require(self.num_sequences >= 1, "sequences", f"must be at least 1, got {self.num_sequences}")
        require(self.head_seconds >= 0, "head", f"must not be negative, got {self.head_seconds}")

    @property
    def exit_probabilities(self) -> tuple[float, ...]:
        """w_k for every block."""
        return exit_probabilities(self.routing)

    @property
    def problem(self) -> Problem:
        return Problem.of(self.costs, self.exit_probabilities)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """How a policy did. A wait is from being ready to being run, a gap from a sequence's token to its next."""

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


@dataclass(slots=True, eq=False)
class Member:
    """A sequence of the loop: since when it has been ready, and when it last spoke."""

    staircase: Staircase
    draws: random.Random
    ready_step: int
    ready_second: float
    spoke_second: float | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """What running a block did with one member."""

    num_rows: int
    is_asked: bool
    leaves: bool


@dataclass(slots=True)
class Record:
    """What has been seen since the warm-up."""

    began_second: float = 0.0
    num_tokens: int = 0
    wait_steps: list[int] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)


class ClosedLoop:
    """The sequences, the clock, and what has been seen."""

    def __init__(self, policy: Policy, load: Load, seed: int) -> None:
        self.policy = policy
        self.load = load
        self.seed = seed
        self.seconds = 0.0
        self.num_steps = 0
        self.record = Record()
        self._exit_probabilities = load.exit_probabilities
        self._ready: list[list[Member]] = [[] for _ in load.routing]
        self._num_arrived = 0
        self._follows = False
        """A lone sequence's next Step is run with the last one."""
        for _ in range(load.num_sequences):
            self._arrive()

    def run(self, num_tokens: int) -> Record:
        """Go on until so many tokens have been spoken; what is seen meanwhile."""
        self.record = Record(began_second=self.seconds)
        while self.record.num_tokens < num_tokens:
            self.step()
        return self.record

    def step(self) -> None:
        """Run one block for all that wait for it."""
        block = self._choose()
        members, self._ready[block] = self._ready[block], []
        for member in members:
            self.record.wait_steps.append(self.num_steps - member.ready_step)
            self.record.wait_seconds.append(self.seconds - member.ready_second)
        visits = [self._visit(member, block) for member in members]
        self._pay(block, visits)
        for member, visit in zip(members, visits, strict=True):
            if visit.leaves:
                self._speak(member)
            else:
                self._wait(member)

    def _choose(self) -> int:
        """The policy's block, unless someone has waited for too long."""
        block, waited = self._longest_wait()
        if waited >= self.load.max_wait_steps:
            return block
        return self.policy.choose([len(members) for members in self._ready])

    def _longest_wait(self) -> tuple[int, int]:
        """Members join their block in order of time, so the first has waited longest there."""
        firsts = [(members[0].ready_step, block) for block, members in enumerate(self._ready) if members]
        ready_step, block = min(firsts)
        return block, self.num_steps - ready_step

    def _visit(self, member: Member, block: int) -> Visit:
        """Carry all pending rows through the block; if the front is among them, ask it."""
        rows = member.staircase.pending_rows(block)
        member.staircase.advance(block, rows)
        is_asked = rows.stop == member.staircase.num_tokens
        leaves = is_asked and member.draws.random() < self._exit_probabilities[block]
        return Visit(len(rows), is_asked, leaves)

    def _pay(self, block: int, visits: list[Visit]) -> None:
        """Let the time pass, and tell the policy."""
        num_rows = sum(visit.num_rows for visit in visits)
        num_asked, num_left = sum(visit.is_asked for visit in visits), sum(visit.leaves for visit in visits)
        follows = self._follows
        cost = self.load.costs.seconds_following if follows else self.load.costs.seconds
        seconds = cost(block, num_rows, num_asked)
        is_through = block == len(self.load.routing) - 1 or (num_left > 0 and self.policy.defers)
        self._follows = self.load.num_sequences == 1 and not is_through
        self.seconds += seconds + num_left * self.load.head_seconds
        self.num_steps += 1
        self.policy.observe(
            block, num_rows=num_rows, seconds=seconds, num_asked=num_asked, num_left=num_left, follows=follows
        )

    def _speak(self, member: Member) -> None:
        self.record.num_tokens += 1
        if member.spoke_second is not None:
            self.record.gap_seconds.append(self.seconds - member.spoke_second)
        member.spoke_second = self.seconds
        member.staircase.append(0)
        if member.staircase.num_generated < TOKENS_PER_SEQUENCE:
            self._wait(member)
        else:
            self._arrive()

    def _wait(self, member: Member) -> None:
        member.ready_step, member.ready_second = self.num_steps, self.seconds
        self._ready[self.policy.ready_block(member.staircase)].append(member)

    def _arrive(self) -> None:
        """A new sequence, whose exits depend on the seed and its number only."""
        number = self._num_arrived
        self._num_arrived += 1
        blocks = len(self.load.routing)
        staircase = Staircase(str(number), [0], SamplingParams(), seed=0, num_blocks=blocks, arrival=number)
        self._wait(Member(staircase, random.Random(f"{self.seed} {number}"), self.num_steps, self.seconds))


def simulate(policy: Policy, load: Load, *, num_tokens: int = 20_000, seed: int = 0) -> Figures:
    """Figures of one policy over so many tokens, after a warm-up."""
    loop = ClosedLoop(policy, load, seed)
    loop.run(round(num_tokens * WARM_UP_SHARE))
    record = loop.run(num_tokens)
    mean_steps, _, p99_steps, max_steps = _spread(record.wait_steps)
    mean_wait, _, p99_wait, max_wait = _spread(record.wait_seconds)
    _, p50_gap, p99_gap, max_gap = _spread(record.gap_seconds)
    return Figures(
        tokens_per_second=record.num_tokens / (loop.seconds - record.began_second),
        mean_wait_steps=mean_steps,
        p99_wait_steps=p99_steps,
        max_wait_steps=max_steps,
        mean_wait_seconds=mean_wait,
        p99_wait_seconds=p99_wait,
        max_wait_seconds=max_wait,
        p50_gap_seconds=p50_gap,
        p99_gap_seconds=p99_gap,
        max_gap_seconds=max_gap,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, median, 99th percentile, maximum."""
    return float(np.mean(values)), *map(float, np.percentile(values, [50, 99, 100]))  # type: ignore[return-value]


def policies_for(load: Load) -> dict[str, Policy]:
    """The schedules of the engine, and thresholds as others publish them, each at its best for this load."""
    return {
        "synchronous": Synchronous(),
        "sweep": Sweep(),
        "threshold": tune(load.problem, load.num_sequences),
        "optimal": solved(load.problem, load.num_sequences),
    }
