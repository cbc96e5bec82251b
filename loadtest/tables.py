"""Tables of a load test: one point in detail, or a sweep with a row per point."""

from collections.abc import Sequence
from dataclasses import asdict, fields

from rich.table import Column, Table
from rich.text import Text

from loadtest.report import LATENCIES, Report, Spread
from loadtest.sweep import Point


def tables(points: Sequence[Point]) -> list[Table]:
    if len(points) > 1:
        return [rates(points), percentiles(points), errors(points)]
    [point] = points
    return [latencies(point.report), totals(point.report), errors(points)]


def latencies(report: Report) -> Table:
    table = numbers("milliseconds", *(field.name for field in fields(Spread)))
    for name in LATENCIES:
        spread = getattr(report, name)
        table.add_row(name.replace("_", " "), *(map(milliseconds, asdict(spread).values()) if spread else ()))
    return table


def totals(report: Report) -> Table:
    table = numbers("totals", "")
    table.add_row("requests", f"{report.num_succeeded}, {report.requests_per_second:.2f}/s")
    if report.goodput is not None:
        table.add_row("within targets", f"{report.num_good}, {report.goodput:.2f}/s")
    table.add_row("tokens", f"{report.num_tokens}, {report.tokens_per_second:.1f}/s")
    table.add_row("seconds", f"{report.duration:.2f}")
    if report.lateness:
        table.add_row("maximum send delay, ms", milliseconds(report.lateness.max))
    num_exits = sum(report.exits.values())
    for exit_, count in report.exits.items():
        table.add_row(f"exit {exit_}", f"{count}, {100 * count / num_exits:.1f}%")
    return table


def errors(points: Sequence[Point]) -> Table:
    table = Table("errors", Column("requests", justify="right"), "example")
    for point in points:
        for kind, count in point.report.errors.items():
            name = f"{kind}, at {point.workload.name}" if len(points) > 1 else kind
            table.add_row(Text(name, "red"), str(count), Text(point.report.messages[kind]))
    return table


def rates(points: Sequence[Point]) -> Table:
    has_targets = any(point.report.goodput is not None for point in points)
    table = numbers("load", "tokens/s", "requests/s", *(["goodput/s"] * has_targets), "requests", "failed")
    for point in points:
        report = point.report
        goodput = [] if report.goodput is None else [f"{report.goodput:.2f}"]
        found = [f"{report.tokens_per_second:.1f}", f"{report.requests_per_second:.2f}", *goodput]
        table.add_row(point.workload.name, *found, str(len(point.results)), str(report.num_failed))
    return table


def percentiles(points: Sequence[Point]) -> Table:
    table = numbers("milliseconds", *(f"{name}\np50 / p99" for name in ("first token", "next token", "request")))
    for point in points:
        spreads = [getattr(point.report, name) for name in LATENCIES]
        cells = [f"{milliseconds(each.p50)} / {milliseconds(each.p99)}" if each else "" for each in spreads]
        table.add_row(point.workload.name, *cells)
    return table


def numbers(title: str, *names: str) -> Table:
    """Return an empty table with names in the first column and numbers in the others."""
    return Table(title, *(Column(name, justify="right") for name in names))


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f}"
