"""The results of a load test: percentiles, rates, exits and errors, and a table with a column per load."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from loadtest.client import RequestResult
from loadtest.workload import Workload

Point = tuple[Workload, dict[str, Any]]
"""A workload and its report."""

LATENCIES = ("time_to_first_token", "inter_token_latency", "latency")


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, nearest-rank percentiles and maximum, in the unit of the values. None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return {"mean": math.fsum(ordered) / len(ordered), "p50": p50, "p90": p90, "p99": p99, "max": ordered[-1]}


def report(results: Sequence[RequestResult]) -> dict[str, Any]:
    """Return the results of one workload as JSON values. Times are in seconds.

    Latencies are of successful requests, token counts are of all requests. The inter-token latency summarises tokens,
    the other latencies summarise requests. Exits count from 1.
    """
    succeeded = [result for result in results if result.error is None]
    first = [result.time_to_first_token for result in succeeded]
    duration = max((result.finished for result in results), default=0.0)
    num_tokens = sum(result.num_tokens for result in results)
    return {
        "duration": duration,
        "num_prompt_tokens": sum(result.num_prompt_tokens for result in results),
        "num_tokens": num_tokens,
        "tokens_per_second": num_tokens / (duration or 1),
        "num_succeeded": len(succeeded),
        "num_failed": len(results) - len(succeeded),
        "requests_per_second": len(succeeded) / (duration or 1),
        "time_to_first_token": spread(seconds for seconds in first if seconds is not None),
        "inter_token_latency": spread(gap for result in succeeded for gap in result.inter_token_latencies),
        "latency": spread(result.latency for result in succeeded),
        "exits": dict(sorted(Counter(exit_ for result in results for exit_ in result.exits).items())),
        "errors": dict(sorted(Counter(result.error for result in results if result.error is not None).items())),
        "messages": {result.error: result.message for result in reversed(results) if result.error is not None},
    }


def table(points: Sequence[Point]) -> Table:
    table = Table("results", *(Column(workload.name, justify="right") for workload, _ in points))
    found = [dict(rows(report)) for _, report in points]
    for name in dict.fromkeys(chain.from_iterable(found)):
        table.add_row(name, *(Text(each.get(name, "")) for each in found))
    return table


def rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report['num_succeeded']}, {report['requests_per_second']:.2f}/s"
    yield "failed", str(report["num_failed"])
    for kind, count in report["errors"].items():
        yield kind, f"{count}: {report['messages'][kind]}"
    yield "tokens", f"{report['num_tokens']}, {report['tokens_per_second']:.1f}/s"
    yield "seconds", f"{report['duration']:.2f}"
    for name in LATENCIES:
        if found := report[name]:
            for statistic, seconds in found.items():
                yield f"{name.replace('_', ' ')}, ms: {statistic}", f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f}"
    for exit_, count in report["exits"].items():
        yield f"exit {exit_}", f"{count}, {100 * count / sum(report['exits'].values()):.1f}%"
