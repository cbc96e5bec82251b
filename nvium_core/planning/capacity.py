"""How many replicas a load needs: requests that arrive at random, the engine's own scheduler, and costs for a clock.

Each replica is taken to get its share of the requests at random. No prompt is found in a cache, and pages do not run
out. Needs no model and no torch.
"""

import math
import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import POLICIES, Optimal, Policy
from nvium_core.engine.schedule.scheduler import Scheduler, Step
from nvium_core.engine.schedule.sequence import Sequence

Range = tuple[int, int]
"""From and to, both included; any number between them is as likely."""

PERCENTILES = (50, 95, 99)

NUM_REQUESTS = 1500
"""Simulated for each number of replicas."""

NEARLY_SATURATED = 0.9
WARNING = "So busy a replica has waits that grow for hours; one more is safer."


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests per second in all, and how long their prompts and answers are, in tokens."""

    rate: float
    prompt_tokens: Range
    output_tokens: Range

    def __post_init__(self) -> None:
        require(0 < self.rate < math.inf, "rate", f"must be above 0, got {self.rate}")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            require(1 <= low <= high, name.replace("_", "-"), f"must be from 1 on and not fall, got {low}:{high}")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What so many percent of the requests have to keep, in seconds: until the first token, and between tokens."""

    first_token: float = math.inf
    between_tokens: float = math.inf
    percentile: float = 95

    def __post_init__(self) -> None:
        require(0 < self.percentile < 100, "percentile", f"must be between 0 and 100, got {self.percentile}")
        is_sound = self.first_token > 0 and self.between_tokens > 0
        require(is_sound, "target", "times must be above 0")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A replica: its costs and routing, and what HTTP takes of the engine's time.

    Steps run at `http_share` of their pace, and each request, and each token that is told, takes so many seconds.
    """

    costs: StepCosts
    routing: tuple[float, ...]
    config: EngineConfig = field(default_factory=EngineConfig)
    http_share: float = 1.0
    http_request_seconds: float = 0.0
    http_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        is_distribution = min(self.routing, default=-1) >= 0 and abs(sum(self.routing) - 1) <= 0.01
        require(is_distribution, "routing", f"probabilities must be at least 0 and sum to 1, got {self.routing}")
        blocks, exits = self.costs.num_blocks, len(self.routing)
        require(blocks == exits, "costs", f"are given for {blocks} blocks, the routing for {exits}")
        require(0 < self.http_share <= 1, "http-share", f"must be above 0 and at most 1, got {self.http_share}")
        require(self.http_request_seconds >= 0, "http-request-ms", "must not be negative")
        require(self.http_token_seconds >= 0, "http-token-ms", "must not be negative")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "costs": self.costs.as_dict(),
            "routing": self.routing,
            "max_sequences": self.config.max_sequences,
            "http_share": self.http_share,
            "http_request_seconds": self.http_request_seconds,
            "http_token_seconds": self.http_token_seconds,
        }


@dataclass(slots=True)
class Request:
    """When it was due and how much it asks, and when its tokens came."""

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
        """On average; 0 of a single token."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)

    @property
    def total(self) -> float:
        return self.last - self.due


class Replica:
    """A scheduler whose Steps take what they cost."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self._machine = machine
        self._draws = random.Random(seed)
        self._leaving = exit_probabilities(machine.routing)
        policy = policy_of(machine)
        pool = PagePool(2**20, 16, keeps_pages=False)
        self._scheduler = Scheduler(policy, pool, machine.config, num_blocks=machine.costs.num_blocks)
        self._requests: dict[Sequence, Request] = {}
        self._now = 0.0
        self._before: Step | None = None

    def serve(self, requests: Items[Request]) -> None:
        """All of them, in the order in which they are due."""
        waiting = iter(requests)
        following = next(waiting, None)
        while following is not None or self._requests:
            if not self._requests and following is not None:
                self._now = max(self._now, following.due)
            while following is not None and following.due <= self._now:
                self._add(following)
                following = next(waiting, None)
            step = self._scheduler.schedule()
            assert step is not None
            self._carry_out(step)

    def _add(self, request: Request) -> None:
        number = len(self._requests)
        sequence = Sequence(
            str(number),
            [0] * request.num_prompt_tokens,
            SamplingParams(max_tokens=request.num_tokens),
            seed=0,
            num_blocks=self._machine.costs.num_blocks,
            arrival=int(1e9 * request.due) + number,
        )
        self._requests[sequence] = request
        self._scheduler.add(sequence)
        self._now += self._machine.http_request_seconds

    def _carry_out(self, step: Step) -> None:
        """Let the time pass, then what is spoken be spoken."""
        asked = [run.sequence for run in step.runs if run.reaches_front]
        leaving = {sequence for sequence in asked if self._draws.random() < self._leaving[step.block]}
        costs = self._machine.costs
        follows = self._follows(step)
        cost = costs.seconds_following if follows else costs.seconds
        seconds = cost(step.block, step.num_rows, len(asked)) / self._machine.http_share
        self._now += seconds
        self._scheduler.policy.observe(
            step.block,
            num_rows=step.num_rows,
            seconds=seconds,
            num_asked=len(asked),
            num_left=len(leaving),
            follows=follows,
        )
        for run in step.runs:
            run.sequence.advance(step.block, run.rows)
        for sequence in leaving:
            self._speak(sequence)
        self._before = step if not leaving or step.goes_on_anyway else None

    def _follows(self, step: Step) -> bool:
        """It was run with the Step before it."""
        expected = None if self._before is None else self._before.following
        return expected is not None and (expected.block, expected.runs[0].sequence) == (
            step.block,
            step.runs[0].sequence,
        )

    def _speak(self, sequence: Sequence) -> None:
        request = self._requests[sequence]
        sequence.append(0)
        self._now += self._machine.http_token_seconds
        if sequence.num_generated == 1:
            request.first = self._now
        if sequence.num_generated == request.num_tokens:
            request.last = self._now
            self._scheduler.remove(sequence)
            del self._requests[sequence]


def policy_of(machine: Machine) -> Policy:
    schedule = machine.config.schedule
    if schedule != "optimal":
        return POLICIES[schedule]()
    policy = Optimal(machine.costs.copy(), ExitFrequencies(exit_probabilities(machine.routing)))
    for number in range(1, machine.config.max_sequences + 1):
        policy.solve_now(number)
    return policy


def arrivals(demand: Demand, replicas: int, count: int, seed: int = 0) -> list[Request]:
    """Of one of so many replicas: a Poisson process."""
    draws = random.Random(seed)
    return [
        Request(due, draws.randint(*demand.prompt_tokens), draws.randint(*demand.output_tokens))
        for due in poisson(draws, demand.rate / replicas, count)
    ]


def poisson(draws: random.Random, rate: float, count: int) -> Iterator[float]:
    due = 0.0
    for _ in range(count):
        due += draws.expovariate(rate)
        yield due


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What clients of so many replicas would see, in seconds by percentile, and the share of the time a replica could
    serve that it does."""

    replicas: int
    requests_per_second: float
    utilization: float
    first_token: dict[int, float]
    between_tokens: dict[int, float]
    total: dict[int, float]
    meets_target: bool


def saturation(machine: Machine, demand: Demand, count: int) -> float:
    """Requests per second of a replica that is never without work."""
    requests = [Request(0.0, request.num_prompt_tokens, request.num_tokens) for request in arrivals(demand, 1, count)]
    Replica(machine).serve(requests)
    return answered_per_second(requests)


def answered_per_second(requests: Items[Request]) -> float:
    """Without the first and the last tenth, when a replica fills and empties."""
    ends = sorted(request.last for request in requests)
    first, last = len(ends) // 10, len(ends) - len(ends) // 10 - 1
    return (last - first) / (ends[last] - ends[first])


def outlook(machine: Machine, demand: Demand, target: Target, replicas: int, most: float, count: int) -> Outlook:
    """`most`: the rate that saturates a replica. What comes in the first tenth, to an idle replica, does not count."""
    requests = arrivals(demand, replicas, count)
    Replica(machine).serve(requests)
    counted = requests[len(requests) // 10 :]
    kept = (
        np.percentile([request.first_token for request in counted], target.percentile) <= target.first_token
        and np.percentile([request.between_tokens for request in counted], target.percentile) <= target.between_tokens
    )
    rate = demand.rate / replicas
    return Outlook(
        replicas=replicas,
        requests_per_second=rate,
        utilization=rate / most,
        first_token=percentiles(counted, "first_token"),
        between_tokens=percentiles(counted, "between_tokens"),
        total=percentiles(counted, "total"),
        meets_target=bool(kept) and rate < most,
    )


def percentiles(requests: Items[Request], name: str) -> dict[int, float]:
    values = [getattr(request, name) for request in requests]
    return {p: float(np.percentile(values, p)) for p in PERCENTILES}


def look_ahead(machine: Machine, demand: Demand, target: Target, count: int = NUM_REQUESTS) -> list[Outlook]:
    """All numbers of replicas that were tried, the last of which is the answer; shows progress on a terminal."""
    return list(track(plan(machine, demand, target, count), "simulating", total=None, transient=True))


def plan(machine: Machine, demand: Demand, target: Target, count: int) -> Iterator[Outlook]:
    """With as many replicas as the rate needs at all, then with more and more until the target is kept, and with fewer.

    If a replica that works a hundredth of the time does not keep it, none will: that is then all that is told.
    """
    most = saturation(machine, demand, count)
    least = max(1, math.ceil(demand.rate / most))
    idle = outlook(machine, demand, target, math.ceil(100 * demand.rate / most), most, count)
    if not idle.meets_target:
        yield idle
        return
    too_few, replicas = least - 1, least
    while True:
        seen = outlook(machine, demand, target, replicas, most, count)
        if seen.meets_target:
            break
        yield seen
        too_few, replicas = replicas, replicas + max(1, replicas // 8)
    while seen.replicas - too_few > 1:
        tried = outlook(machine, demand, target, (too_few + seen.replicas) // 2, most, count)
        if tried.meets_target:
            seen = tried
        else:
            yield tried
            too_few = tried.replicas
    yield seen


def span(text: str, option: str) -> Range:
    """`N` or `N:N` as it is typed."""
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    require(1 <= len(numbers) <= 2, option, f"must be a number, or two with a colon between them, got {text!r}")
    return numbers[0], numbers[-1]


def table(seen: Items[Outlook], demand: Demand, target: Target) -> Table:
    columns = "replicas", "requests/s each", "busy", "first token ms", "between tokens ms", "total s", "target"
    result = Table(*columns, caption=remark(seen, demand, target))
    for look in seen:
        first, between = (spread(values, 1000) for values in (look.first_token, look.between_tokens))
        verdict = "kept" if look.meets_target else "not kept"
        rates = f"{look.requests_per_second:.2f}", f"{look.utilization:.0%}"
        result.add_row(str(look.replicas), *rates, first, between, spread(look.total, 1), verdict)
    return result


def spread(seconds: dict[int, float], unit: float) -> str:
    return " / ".join(f"{unit * seconds[p]:.3g}" for p in PERCENTILES)


def remark(seen: Items[Outlook], demand: Demand, target: Target) -> str:
    """The answer in words."""
    last = seen[-1]
    most = last.requests_per_second / last.utilization
    told = f"A replica is saturated by {most:.2f} requests/s. Times are {' / '.join(f'p{p}' for p in PERCENTILES)}."
    if not last.meets_target:
        return f"{told} No number of replicas keeps the target: even one that is idle does not."
    answer = f"{told} {demand.rate:g} requests/s need {last.replicas}, p{target.percentile:g} within the target."
    return answer if last.utilization < NEARLY_SATURATED else f"{answer} {WARNING}"


def as_dict(machine: Machine, demand: Demand, target: Target, seen: Items[Outlook]) -> dict[str, Any]:
    """What was asked and what came of it, for JSON; no target is null."""
    asked = asdict(demand) | {name: value if value < math.inf else None for name, value in asdict(target).items()}
    last = seen[-1]
    return {
        **machine.as_dict(),
        **asked,
        "saturated_by": last.requests_per_second / last.utilization,
        "replicas": last.replicas if last.meets_target else None,
        "rows": [asdict(look) for look in seen],
    }
