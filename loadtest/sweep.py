"""Measures workloads, each after a warm-up, and shows them in a table with a column per load."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from loadtest.client import LoadClient, RequestResult
from loadtest.report import LATENCIES, Report
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


def table(points: Sequence[Point]) -> Table:
    table = Table("results", *(Column(point.workload.name, justify="right") for point in points))
    found = [dict(rows(point.report)) for point in points]
    for name in dict.fromkeys(chain.from_iterable(found)):
        table.add_row(name, *(Text(each.get(name, "")) for each in found))
    return table


def rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.num_succeeded}, {report.requests_per_second:.2f}/s"
    yield "failed", str(report.num_failed)
    for kind, count in report.errors.items():
        yield kind, f"{count}: {report.messages[kind]}"
    yield "tokens", f"{report.num_tokens}, {report.tokens_per_second:.1f}/s"
    yield "seconds", f"{report.duration:.2f}"
    for name in LATENCIES:
        if spread := getattr(report, name):
            for statistic, seconds in asdict(spread).items():
                yield f"{name.replace('_', ' ')}, ms: {statistic}", milliseconds(seconds)
    for exit_, count in report.exits.items():
        yield f"exit {exit_}", f"{count}, {100 * count / sum(report.exits.values()):.1f}%"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f}"
