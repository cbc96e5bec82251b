"""The table of a load test, with a column per load."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain

from rich.table import Column, Table
from rich.text import Text

from loadtest.report import LATENCIES, Report
from loadtest.sweep import Point


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
