"""Measures workloads, each after a warm-up."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from loadtest.client import LoadClient, RequestResult
from loadtest.report import Report
from loadtest.workload import Workload

OnDone = Callable[[RequestResult], None]
Watch = Callable[[str, int], OnDone]
"""Takes a workload's name and number of requests. Returns the function to call with each result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    workload: Workload
    report: Report

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Times are in seconds."""
        rate = self.workload.rate
        return {"concurrency": None if rate else self.workload.concurrency, "rate": rate, "report": asdict(self.report)}


def workloads(base: Workload, levels: Iterable[Mapping[str, Any]], warm_up: int) -> list[Workload]:
    """Return a copy of `base` for each level of load. All requests, including warm-ups, have different seeds."""
    each = warm_up + base.num_requests
    return [replace(base, **level, first=k * each + warm_up) for k, level in enumerate(levels)]


async def measure(client: LoadClient, load: Workload, warm_up: int, watch: Watch) -> Point:
    """Measure a workload, after `warm_up` requests that do not count."""
    if warm_up:
        warming = replace(load, num_requests=warm_up, first=load.first - warm_up)
        await client.run(warming, watch(f"{load.name}, warm-up", warm_up))
    results = await client.run(load, watch(load.name, load.num_requests))
    return Point(workload=load, report=Report.of(results))
