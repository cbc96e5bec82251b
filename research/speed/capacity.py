"""Estimate how many replicas a load needs.

    python -m research.speed.capacity --pace pace.json --prefill 4000 --rate 20 --target-ttft-ms 300

A replica is a queue. At most `--max-sequences` requests run at once. If n requests run, they share rate(n) tokens per
second, as measured by `nvium bench schedules --sequences 1,4,16 --json pace.json`. The rate is interpolated between the
measured numbers of sequences, and constant beyond them. Prompts are processed one at a time, at `--prefill` tokens per
second. Requests arrive as a Poisson process and are split evenly among replicas.
"""

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.workload import Lengths
from nvium_core.bench.figures import write_json

MEASURES = ("first_token", "between_tokens", "total")
PERCENTILES = (50, 95, 99)
NUM_REQUESTS = 2000
IDLE = 0.01
"""Utilization below which more replicas do not help."""

GROWTH = 8
"""Each iteration adds 1/8 of the replicas, at least one."""


@dataclass(slots=True)
class Request:
    """A request: its lengths in tokens, and the times in seconds of its arrival, first token and last token."""

    arrival: float
    num_prompt_tokens: int
    num_tokens: int
    first: float = math.nan
    last: float = math.nan

    @property
    def first_token(self) -> float:
        return self.first - self.arrival

    @property
    def between_tokens(self) -> float:
        """The mean time between tokens, or 0 for a single token."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)

    @property
    def total(self) -> float:
        return self.last - self.arrival


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica. `pace[n]` is the tokens per second of n sequences together. `prefill` is prompt tokens per second."""

    pace: Mapping[int, float]
    prefill: float
    max_sequences: int = 32

    def rate(self, num_sequences: int) -> float:
        numbers = sorted(self.pace)
        return float(np.interp(num_sequences, numbers, [self.pace[number] for number in numbers]))

    def serve(self, requests: Sequence[Request]) -> None:
        """Set the requests' `first` and `last`. Requests must be sorted by `arrival`.

        All running sequences emit at the same pace. `emitted` is the number of tokens that an endless sequence has
        emitted since the start. A request ends when `emitted` has grown by the request's length.
        """
        waiting, running = deque(requests), list[tuple[float, int]]()
        now = emitted = 0.0
        rates = [0.0, *(self.rate(number) for number in range(1, self.max_sequences + 1))]
        number = 0
        while waiting or running:
            has_room = bool(waiting) and len(running) < self.max_sequences
            if has_room and (waiting[0].arrival <= now or not running):
                request = waiting.popleft()
                request.first = now = max(now, request.arrival) + request.num_prompt_tokens / self.prefill
                heappush(running, (emitted + request.num_tokens - 1, number))
                number += 1
                continue
            pace = rates[len(running)] / len(running)
            end = now + (running[0][0] - emitted) / pace
            if has_room and waiting[0].arrival < end:
                emitted += (waiting[0].arrival - now) * pace
                now = waiting[0].arrival
            else:
                now, (emitted, ended) = end, heappop(running)
                requests[ended].last = now


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The total requests per second, and their lengths in tokens."""

    rate: float
    prompt_tokens: Lengths
    output_tokens: Lengths

    def requests(self, replicas: int, count: int) -> list[Request]:
        draws = random.Random(0)
        arrivals = accumulate(draws.expovariate(self.rate / replicas) for _ in range(count))
        return [
            Request(arrival, self.prompt_tokens.draw(draws), self.output_tokens.draw(draws)) for arrival in arrivals
        ]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Latencies in seconds that `percentile` percent of requests must meet."""

    first_token: float = math.inf
    between_tokens: float = math.inf
    percentile: float = 95


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Simulated latencies in seconds by measure and percentile, and each replica's utilization."""

    replicas: int
    utilization: float
    seconds: dict[str, dict[int, float]]
    meets_target: bool


def saturation(replica: Replica, demand: Demand, count: int = NUM_REQUESTS) -> float:
    """Return the requests per second that a replica sustains when it is never idle."""
    requests = [replace(request, arrival=0.0) for request in demand.requests(1, count)]
    replica.serve(requests)
    return count / max(request.last for request in requests)


def outlook(replica: Replica, demand: Demand, target: Target, replicas: int, most: float) -> Outlook:
    """Simulate replicas that each sustain `most` requests per second. The first tenth of requests is a warm-up."""
    requests = demand.requests(replicas, NUM_REQUESTS)
    replica.serve(requests)
    counted = requests[NUM_REQUESTS // 10 :]
    kept = (
        percentile(counted, "first_token", target.percentile) <= target.first_token
        and percentile(counted, "between_tokens", target.percentile) <= target.between_tokens
    )
    utilization = demand.rate / replicas / most
    return Outlook(
        replicas=replicas,
        utilization=utilization,
        seconds=percentiles(counted),
        meets_target=kept and utilization < 1,
    )


def percentile(requests: Sequence[Request], measure: str, share: float) -> float:
    return float(np.percentile([getattr(request, measure) for request in requests], share))


def percentiles(requests: Sequence[Request]) -> dict[str, dict[int, float]]:
    return {measure: {p: percentile(requests, measure, p) for p in PERCENTILES} for measure in MEASURES}


def plan(replica: Replica, demand: Demand, target: Target) -> Iterator[Outlook]:
    """Try increasing numbers of replicas until the target is met or the replicas are almost idle.

    Start with the lowest number of replicas that sustains the rate.
    """
    most = saturation(replica, demand)
    replicas = math.ceil(demand.rate / most)
    while True:
        seen = outlook(replica, demand, target, replicas, most)
        yield seen
        if seen.meets_target or seen.utilization < IDLE:
            return
        replicas += max(1, replicas // GROWTH)


def table(seen: Sequence[Outlook], most: float) -> Table:
    answer = f"{seen[-1].replicas} replicas meet the target" if seen[-1].meets_target else "No number meets the target"
    caption = f"A replica sustains {most:.2f} requests/s. {answer}. Times are p50 / p95 / p99."
    result = Table("replicas", "busy", "first token ms", "between tokens ms", "total ms", caption=caption)
    for each in seen:
        times = (spread(each.seconds[measure]) for measure in MEASURES)
        result.add_row(str(each.replicas), f"{each.utilization:.0%}", *times)
    return result


def spread(seconds: Mapping[int, float]) -> str:
    return " / ".join(f"{1000 * seconds[p]:.3g}" for p in PERCENTILES)


def read_pace(text: str) -> dict[int, float]:
    """Parse `1:120,8:400`, or read the fastest schedule's rates from a JSON file of `nvium bench schedules`."""
    if not text.endswith(".json"):
        pairs = (part.split(":") for part in text.split(","))
        return {int(number): float(rate) for number, rate in pairs}
    rows = json.loads(Path(text).read_text(encoding="utf-8"))["rows"]
    return {row["sequences"]: max(each["tokens_per_second"] for each in row["schedules"].values()) for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="research.speed.capacity", description=__doc__)
    add = parser.add_argument
    add("--pace", type=read_pace, required=True, help="N:RATE,… or a JSON file of `nvium bench schedules`")
    add("--prefill", type=float, required=True, help="prompt tokens per second")
    add("--max-sequences", type=int, default=32, help="maximum number of running sequences [32]")
    add("--rate", type=float, default=1.0, help="requests per second [1]")
    add("--prompt-tokens", type=Lengths.parse, default="64", help="N or N:N")
    add("--output-tokens", type=Lengths.parse, default="128", help="N or N:N")
    add("--target-ttft-ms", type=float, default=math.inf)
    add("--target-itl-ms", type=float, default=math.inf)
    add("--percentile", type=float, default=95.0, help="percentage of requests that must meet the targets [95]")
    add("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    replica = Replica(pace=args.pace, prefill=args.prefill, max_sequences=args.max_sequences)
    demand = Demand(rate=args.rate, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens)
    first, between = args.target_ttft_ms / 1000, args.target_itl_ms / 1000
    target = Target(first_token=first, between_tokens=between, percentile=args.percentile)
    seen, most = list(plan(replica, demand, target)), saturation(replica, demand)
    Console().print(table(seen, most))
    kept = {name: value for name, value in asdict(target).items() if value < math.inf}
    figures = asdict(replica) | {"target": kept, "demand": asdict(demand), "saturated_by": most}
    figures["rows"] = [asdict(each) for each in seen]
    if args.json:
        write_json(figures, args.json)


if __name__ == "__main__":
    main()
