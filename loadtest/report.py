"""What a load test found: percentiles, rates, exits and errors, as a table for people and JSON for programs."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeVar

from rich.table import Column, Table
from rich.text import Text

from loadtest.client import Outcome

K = TypeVar("K", int, str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds: the mean and the smallest values that 50, 90 and 99 percent do not exceed."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where nothing was measured."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Latencies are of the requests that succeeded; tokens are of all, for the server made them all."""

    duration: float
    num_succeeded: int
    num_prompt_tokens: int
    num_tokens: int
    time_to_first_token: Spread | None
    inter_token_latency: Spread | None
    latency: Spread | None
    exits: dict[int, int]
    errors: dict[str, int]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Self:
        succeeded = [outcome for outcome in outcomes if outcome.error is None]
        first = [outcome.time_to_first_token for outcome in succeeded]
        return cls(
            duration=max((outcome.finished for outcome in outcomes), default=0.0),
            num_succeeded=len(succeeded),
            num_prompt_tokens=sum(outcome.num_prompt_tokens for outcome in outcomes),
            num_tokens=sum(outcome.num_tokens for outcome in outcomes),
            time_to_first_token=Spread.of([seconds for seconds in first if seconds is not None]),
            inter_token_latency=Spread.of([gap for outcome in succeeded for gap in outcome.inter_token_latencies]),
            latency=Spread.of([outcome.latency for outcome in succeeded]),
            exits=_counts(exit_ for outcome in outcomes for exit_ in outcome.exits),
            errors=_counts(outcome.error for outcome in outcomes if outcome.error is not None),
        )

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.duration if self.duration else 0.0

    @property
    def requests_per_second(self) -> float:
        return self.num_succeeded / self.duration if self.duration else 0.0

    def to_json(self) -> dict[str, Any]:
        """Seconds and counts; exits are keyed by their 1-based number."""
        rates = {"tokens_per_second": self.tokens_per_second, "requests_per_second": self.requests_per_second}
        return {**asdict(self), "num_failed": self.num_failed, **rates}

    def tables(self) -> list[Table]:
        return [self._latencies(), self._totals()]

    def _latencies(self) -> Table:
        table = Table("milliseconds", *(Column(field.name, justify="right") for field in fields(Spread)))
        for name in ("time_to_first_token", "inter_token_latency", "latency"):
            spread = getattr(self, name)
            table.add_row(name.replace("_", " "), *(_milliseconds(spread) if spread else ()))
        return table

    def _totals(self) -> Table:
        table = Table("totals", Column(justify="right"))
        table.add_row("requests", f"{self.num_succeeded}, {self.requests_per_second:.2f}/s")
        table.add_row("tokens", f"{self.num_tokens}, {self.tokens_per_second:.1f}/s")
        table.add_row("seconds", f"{self.duration:.2f}")
        num_exits = sum(self.exits.values())
        for exit_, count in self.exits.items():
            table.add_row(f"exit {exit_}", f"{count}, {100 * count / num_exits:.1f}%")
        for error, count in self.errors.items():
            table.add_row(Text(error, "red"), f"{count}")
        return table


def _milliseconds(spread: Spread) -> list[str]:
    return [f"{1000 * seconds:.1f}" for seconds in asdict(spread).values()]


def _counts(values: Iterable[K]) -> dict[K, int]:
    """How often each occurs, in order."""
    return dict(sorted(Counter(values).items()))
