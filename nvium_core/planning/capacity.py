"""How many replicas a demand needs: requests arrive at random, and each replica's share of them is simulated."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from nvium_core.engine.params import require
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import Request, serve

Range = tuple[int, int]
"""From and to, inclusive, equally likely."""

PERCENTILES = (50, 95, 99)

NUM_REQUESTS = 1500
"""Simulated for each number of replicas."""

NEARLY_SATURATED = 0.9
WARNING = "So busy a replica has waits that grow for hours; one more is safer."


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests per second in total, and the lengths of prompts and answers in tokens."""

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
    """What `percentile` percent of requests must keep, in seconds: first token, and mean time between tokens."""

    first_token: float = math.inf
    between_tokens: float = math.inf
    percentile: float = 95

    def __post_init__(self) -> None:
        require(0 < self.percentile < 100, "percentile", f"must be between 0 and 100, got {self.percentile}")
        is_sound = self.first_token > 0 and self.between_tokens > 0
        require(is_sound, "target", "times must be above 0")


def arrivals(demand: Demand, replicas: int, count: int, seed: int = 0) -> list[Request]:
    """Poisson arrivals at one of `replicas` replicas."""
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
    """What clients of so many replicas would see, in seconds by percentile, and each replica's utilization."""

    replicas: int
    requests_per_second: float
    utilization: float
    first_token: dict[int, float]
    between_tokens: dict[int, float]
    total: dict[int, float]
    meets_target: bool


def saturation(machine: Machine, demand: Demand, count: int) -> float:
    """Requests per second of a replica that always has work."""
    requests = [Request(0.0, request.num_prompt_tokens, request.num_tokens) for request in arrivals(demand, 1, count)]
    serve(machine, requests)
    return answered_per_second(requests)


def answered_per_second(requests: Sequence[Request]) -> float:
    """Without the first and the last tenth, while the replica fills and empties."""
    ends = sorted(request.last for request in requests)
    first, last = len(ends) // 10, len(ends) - len(ends) // 10 - 1
    return (last - first) / (ends[last] - ends[first])


def outlook(machine: Machine, demand: Demand, target: Target, replicas: int, most: float, count: int) -> Outlook:
    """`most`: the rate that saturates a replica. The first tenth of requests, sent to an idle one, does not count."""
    requests = arrivals(demand, replicas, count)
    serve(machine, requests)
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


def percentiles(requests: Sequence[Request], name: str) -> dict[int, float]:
    values = [getattr(request, name) for request in requests]
    return {p: float(np.percentile(values, p)) for p in PERCENTILES}


def look_ahead(machine: Machine, demand: Demand, target: Target, count: int = NUM_REQUESTS) -> list[Outlook]:
    """All numbers of replicas tried; the last is the answer. Shows progress on a terminal."""
    return list(track(plan(machine, demand, target, count), "simulating", total=None, transient=True))


def plan(machine: Machine, demand: Demand, target: Target, count: int) -> Iterator[Outlook]:
    """Start with the replicas that the rate needs at least, add more until the target is kept, then try fewer.

    If a replica with 1% utilization misses the target, none will keep it, and only that one is returned.
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
    """Parses `N` or `N:N`."""
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    require(1 <= len(numbers) <= 2, option, f"must be a number, or two with a colon between them, got {text!r}")
    return numbers[0], numbers[-1]


def table(seen: Sequence[Outlook], demand: Demand, target: Target) -> Table:
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


def remark(seen: Sequence[Outlook], demand: Demand, target: Target) -> str:
    """The answer in words."""
    last = seen[-1]
    most = last.requests_per_second / last.utilization
    told = f"A replica is saturated by {most:.2f} requests/s. Times are {' / '.join(f'p{p}' for p in PERCENTILES)}."
    if not last.meets_target:
        return f"{told} No number of replicas keeps the target: even one that is idle does not."
    answer = f"{told} {demand.rate:g} requests/s need {last.replicas}, p{target.percentile:g} within the target."
    return answer if last.utilization < NEARLY_SATURATED else f"{answer} {WARNING}"


def as_dict(machine: Machine, demand: Demand, target: Target, seen: Sequence[Outlook]) -> dict[str, Any]:
    """Inputs and results, for JSON; no target is null."""
    asked = asdict(demand) | {name: value if value < math.inf else None for name, value in asdict(target).items()}
    last = seen[-1]
    return {
        **machine.as_dict(),
        **asked,
        "saturated_by": last.requests_per_second / last.utilization,
        "replicas": last.replicas if last.meets_target else None,
        "rows": [asdict(look) for look in seen],
    }
