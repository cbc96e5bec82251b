"""Runs several workloads in sequence, each after a warm-up."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loadtest.client import LoadClient, RequestResult
from loadtest.report import Report
from loadtest.workload import Workload

OnDone = Callable[[RequestResult], None]
Watch = Callable[[str, int], OnDone]
"""Takes a workload's name and number of requests. Returns the function to call with each result."""

REQUEST_FIELDS = (
    "due",
    "sent",
    "time_to_first_token",
    "mean_inter_token_latency",
    "latency",
    "num_prompt_tokens",
    "num_tokens",
    "exits",
    "error",
    "message",
)
"""Fields of a `RequestResult` that the JSON file contains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The measurement of one workload. `results` are in order of completion."""

    workload: Workload
    results: Sequence[RequestResult]
    report: Report

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Times are in seconds; requests are in the order in which they were due."""
        results = sorted(self.results, key=lambda result: result.due)
        return {
            "concurrency": None if self.workload.rate else self.workload.concurrency,
            "rate": self.workload.rate,
            "report": asdict(self.report),
            "requests": [{name: getattr(result, name) for name in REQUEST_FIELDS} for result in results],
        }


def workloads(base: Workload, levels: Iterable[Mapping[str, Any]], warm_up: int) -> list[Workload]:
    """Return a copy of `base` for each level of load. All requests, including warm-ups, have different seeds."""
    each = warm_up + base.num_requests
    return [replace(base, **level, first=k * each + warm_up) for k, level in enumerate(levels)]


async def measure(client: LoadClient, sweep: Iterable[Workload], warm_up: int, watch: Watch) -> list[Point]:
    """Measure each workload, after `warm_up` requests that do not count. Return early if the client is stopped."""
    points: list[Point] = []
    for load in sweep:
        if warm_up:
            warming = replace(load, num_requests=warm_up, first=load.first - warm_up)
            await client.run(warming, watch(f"{load.name}, warm-up", warm_up))
        if client.stopped:
            break
        results = await client.run(load, watch(load.name, load.num_requests))
        points.append(Point(workload=load, results=results, report=Report.of(results)))
    return points
