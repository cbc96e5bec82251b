"""The results of a load test: percentiles, rates, exits and errors, and a table with a column per load."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Self

from rich.table import Column, Table
from rich.text import Text

from loadtest.client import RequestResult
from loadtest.workload import Workload

LATENCIES = ("time_to_first_token", "inter_token_latency", "latency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """In seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The results of one workload. Latencies are of successful requests, token counts are of all requests.

    inter_token_latency: summarises tokens; the other latencies summarise requests.
    exits: number of tokens by exit, counted from 1.
    """

    duration: float
    num_prompt_tokens: int
    num_tokens: int
    tokens_per_second: float
    num_succeeded: int
    num_failed: int
    requests_per_second: float
    time_to_first_token: Spread | None
    inter_token_latency: Spread | None
    latency: Spread | None
    exits: dict[int, int]
    errors: dict[str, int]
    messages: dict[str, str]

    @classmethod
    def of(cls, results: Sequence[RequestResult]) -> Self:
        succeeded = [result for result in results if result.error is None]
        first = [result.time_to_first_token for result in succeeded]
        duration = max((result.finished for result in results), default=0.0)
        num_tokens = sum(result.num_tokens for result in results)
        return cls(
            duration=duration,
            num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
            num_tokens=num_tokens,
            tokens_per_second=num_tokens / (duration or 1),
            num_succeeded=len(succeeded),
            num_failed=len(results) - len(succeeded),
            requests_per_second=len(succeeded) / (duration or 1),
            time_to_first_token=Spread.of(seconds for seconds in first if seconds is not None),
            inter_token_latency=Spread.of(gap for result in succeeded for gap in result.inter_token_latencies),
            latency=Spread.of(result.latency for result in succeeded),
            exits=dict(sorted(Counter(exit_ for result in results for exit_ in result.exits).items())),
            errors=dict(sorted(Counter(result.error for result in results if result.error is not None).items())),
            messages={result.error: result.message for result in reversed(results) if result.error is not None},
        )


Point = tuple[Workload, Report]


def table(points: Sequence[Point]) -> Table:
    table = Table("results", *(Column(workload.name, justify="right") for workload, _ in points))
    found = [dict(rows(report)) for _, report in points]
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
                yield f"{name.replace('_', ' ')}, ms: {statistic}", f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f}"
    for exit_, count in report.exits.items():
        yield f"exit {exit_}", f"{count}, {100 * count / sum(report.exits.values()):.1f}%"
