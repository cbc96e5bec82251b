"""Compares `capacity`'s simulation with a load test: its requests simulated, beside what its clients saw.

Arrivals and lengths are the load test's own, so only exits are random.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from nvium_core.engine.params import InvalidRequest, require
from nvium_core.planning.capacity import PERCENTILES, answered_per_second, percentiles
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import Request, serve

MEASURES = {"first_token": "first token", "between_tokens": "between tokens", "total": "whole request"}

TOLERANCE = 0.15
"""A forecast within this share of the measurement counts as met."""


SATURATED = 0.9
"""Saturated if answers come at no more than this share of the arrival rate."""

NUM_SIMULATIONS = 3
"""Of a load, with different exits."""

HTTP_STEPS = {"http_token_seconds": 0.00008, "http_request_seconds": 0.002, "http_share": 0.08}
"""First step sizes of the fit."""

MIN_REQUESTS = 20
"""Of a load, for percentiles to mean something."""


@dataclass(frozen=True)
class Load:
    """Requests at one rate, as their clients saw them."""

    rate: float
    seen: list[Request]

    @property
    def arrived_per_second(self) -> float:
        """In this test; arrivals are drawn at `rate`."""
        return (len(self.seen) - 1) / (self.seen[-1].due - self.seen[0].due)

    def foreseen(self, machine: Machine, seed: int) -> list[Request]:
        """The same requests, simulated."""
        requests = [Request(request.due, request.num_prompt_tokens, request.num_tokens) for request in self.seen]
        serve(machine, requests, seed)
        return requests


@dataclass(frozen=True)
class Forecast:
    """One load, simulated and measured: seconds by percentile of each of `MEASURES`, answers per second."""

    rate: float
    arrived_per_second: float
    num_requests: int
    planned: dict[str, dict[int, float]]
    measured: dict[str, dict[int, float]]
    planned_answers: float
    measured_answers: float

    def ratio(self, measure: str, percentile: int) -> float:
        return self.planned[measure][percentile] / self.measured[measure][percentile]

    @property
    def measures(self) -> list[str]:
        """Without between_tokens where answers have one token."""
        return [measure for measure in MEASURES if self.measured[measure][PERCENTILES[0]] > 0]

    @property
    def is_saturated(self) -> bool:
        """The queue grew as long as requests came."""
        return self.measured_answers < SATURATED * self.arrived_per_second

    @property
    def ratios(self) -> list[float]:
        """Planned over measured: the answers, and every percentile that can be compared.

        Beyond saturation only times between tokens: waits sum up all differences over the test.
        """
        compared = {"between_tokens"} if self.is_saturated else set(MEASURES)
        known = [measure for measure in self.measures if measure in compared]
        of_times = [self.ratio(measure, percentile) for measure in known for percentile in PERCENTILES]
        return [*of_times, self.planned_answers / self.measured_answers]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "requests": self.num_requests,
            "is_saturated": self.is_saturated,
            "planned": {**self.planned, "answered_per_second": self.planned_answers},
            "measured": {**self.measured, "answered_per_second": self.measured_answers},
            "planned_over_measured": {
                **{measure: {p: self.ratio(measure, p) for p in PERCENTILES} for measure in self.measures},
                "answered_per_second": self.planned_answers / self.measured_answers,
            },
        }


def read(path: Path) -> tuple[list[Load], tuple[float, ...]]:
    """The loads of a report that `python -m loadtest --rate … --json` wrote, and the shares of its exits.

    Raises `InvalidRequest` for any other file, and for a report with failed requests.
    """
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
        loads = [Load(float(point["rate"]), [seen(each) for each in point["requests"]]) for point in points]
        exits = Counter(number for point in points for each in point["requests"] for number in each["exits"])
    except (ValueError, LookupError, TypeError, AttributeError):
        loads, exits = [], Counter()
    message = f"{path} must be what `python -m loadtest --rate … --json` wrote of an nvium, with no request failed"
    require(bool(loads) and exits.total() > 0, "against", message)
    fewest = min(len(load.seen) for load in loads)
    require(fewest >= MIN_REQUESTS, "against", f"{path} needs {MIN_REQUESTS} requests of each load, has {fewest}")
    return loads, tuple(exits[number] / exits.total() for number in range(1, max(exits) + 1))


def seen(request: dict[str, Any]) -> Request:
    due = float(request["due"])
    first, last = due + request["time_to_first_token"], due + request["latency"]
    return Request(due, request["num_prompt_tokens"], request["num_tokens"], first, last)


def forecast(machine: Machine, load: Load, num_simulations: int = NUM_SIMULATIONS) -> Forecast:
    """Several simulations together."""
    foreseen = [load.foreseen(machine, seed) for seed in range(num_simulations)]
    together = [request for requests in foreseen for request in requests]
    return Forecast(
        load.rate,
        load.arrived_per_second,
        len(load.seen),
        planned={measure: percentiles(together, measure) for measure in MEASURES},
        measured={measure: percentiles(load.seen, measure) for measure in MEASURES},
        planned_answers=fmean(map(answered_per_second, foreseen)),
        measured_answers=answered_per_second(load.seen),
    )


def forecasts(machine: Machine, loads: Sequence[Load]) -> list[Forecast]:
    """Shows progress on a terminal."""
    return [forecast(machine, load) for load in track(loads, "simulating", transient=True)]


def fit(machine: Machine, loads: Sequence[Load]) -> Machine:
    """The machine with the HTTP costs that forecast these loads best. Shows progress on a terminal.

    Coordinate descent from the machine's own values, with three step sizes.
    """
    best, least = machine, error(machine, loads)
    for scale in track((1.0, 0.5, 0.25), "fitting", transient=True):
        for name, step in HTTP_STEPS.items():
            for change in (scale * step, -scale * step):
                while (tried := changed(best, name, change)) and (off := error(tried, loads)) < least:
                    best, least = tried, off
    return best


def changed(machine: Machine, name: str, by: float) -> Machine | None:
    """None if the value is invalid."""
    try:
        return replace(machine, **{name: getattr(machine, name) + by})
    except InvalidRequest:
        return None


def error(machine: Machine, loads: Sequence[Load]) -> float:
    """Mean absolute log ratio of planned to measured, one simulation a load."""
    return fmean(abs(math.log(ratio)) for load in loads for ratio in forecast(machine, load, 1).ratios)


def table(machine: Machine, found: Sequence[Forecast]) -> Table:
    ratios = np.array([ratio for each in found for ratio in each.ratios])
    met = int(np.sum(np.abs(ratios - 1) <= TOLERANCE))
    http = (
        f"--http-share {machine.http_share:.2f} --http-request-ms {1000 * machine.http_request_seconds:.2g} "
        f"--http-token-ms {1000 * machine.http_token_seconds:.2g}"
    )
    told = f"Planned / measured. {met} of {len(ratios)} within {TOLERANCE:.0%}, half within {spread(ratios):.0%}."
    result = Table("requests/s", "ms", *(f"p{percentile}" for percentile in PERCENTILES), caption=f"{told}\n{http}")
    for each in found:
        result.add_row(f"{each.rate:g}", "answers/s", f"{each.planned_answers:.1f} / {each.measured_answers:.1f}")
        for measure, name in MEASURES.items():
            planned, measured = each.planned[measure], each.measured[measure]
            times = (f"{1000 * planned[p]:.3g} / {1000 * measured[p]:.3g}" for p in PERCENTILES)
            result.add_row("", name, *times)
        result.add_section()
    return result


def spread(ratios: "np.typing.NDArray[np.float64]") -> float:
    """Half of the ratios are within this distance of 1."""
    return float(np.median(np.abs(ratios - 1)))


def as_dict(machine: Machine, found: Sequence[Forecast]) -> dict[str, Any]:
    return {**machine.as_dict(), "loads": [each.as_dict() for each in found]}
