"""Workloads one after another, each warmed up, and what became of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtest.client import LoadClient, RequestResult
from loadtest.report import Report, Targets
from loadtest.server_view import ServerView, totals
from loadtest.workload import Workload

OnDone = Callable[[RequestResult], None]
Watch = Callable[[str, int], OnDone]
"""Is told what is to come and of how many requests; what it gives hears of each."""

KEPT = (
    "due",
    "sent",
    "time_to_first_token",
    "mean_inter_token_latency",
    "latency",
    "category",
    "num_prompt_tokens",
    "num_tokens",
    "exits",
    "error",
    "message",
)
"""Of every request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One workload, measured. `results` are in order of completion."""

    workload: Workload
    results: Sequence[RequestResult]
    report: Report
    view: ServerView

    def to_json(self) -> dict[str, Any]:
        """Times in seconds; requests in order of when they were due."""
        results = sorted(self.results, key=lambda result: result.due)
        return {
            "concurrency": None if self.workload.rate else self.workload.concurrency,
            "rate": self.workload.rate,
            "report": self.report.to_json(),
            "means": self.view.to_json(self.report),
            "requests": [{name: getattr(result, name) for name in KEPT} for result in results],
        }


def workloads(base: Workload, levels: Iterable[Mapping[str, Any]], warm_up: int) -> list[Workload]:
    """The base at each level of load. Prompts and seeds go on from one to the next, each after its own warm-up."""
    each = warm_up + base.num_requests
    return [replace(base, **level, first=k * each + warm_up) for k, level in enumerate(levels)]


async def measure(
    client: LoadClient, sweep: Iterable[Workload], warm_up: int, targets: Targets, watch: Watch
) -> list[Point]:
    """A point for every workload, up to the one in which the client was stopped."""
    points: list[Point] = []
    for load in sweep:
        if warm_up:
            warming = replace(load, num_requests=warm_up, first=load.first - warm_up)
            await client.run(warming, watch(f"{load.name}, warm-up", warm_up))
        if client.stopped:
            break
        points.append(await point(client, load, targets, watch(load.name, load.num_requests)))
    return points


async def point(client: LoadClient, load: Workload, targets: Targets, on_done: OnDone) -> Point:
    before = await totals(client.http)
    results = await client.run(load, on_done)
    view = ServerView(before, before if client.stopped else await totals(client.http))
    return Point(workload=load, results=results, report=Report.of(results, targets), view=view)
