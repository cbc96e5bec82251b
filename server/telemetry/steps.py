"""Metrics of Steps and emitted tokens.

Only one thread updates each, so they need no lock. prometheus_client's histograms would take 20 µs per token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nvium_core import Event, StepReport, TokenEvent

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Tally:
    """A histogram without labels or locks. `bounds` are the buckets' upper bounds, without infinity."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self._bounds = bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, map(float, accumulate(self.counts)), strict=True)), self._sum)


class TallyMetric(Tally, Collector):
    def __init__(self, name: str, about: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        super().__init__(bounds)
        self._name, self._about = name, about
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about)
        self.add_to(family)
        yield family


class StepMetrics(Collector):
    """Counters and histograms per block and exit, both counted from 1.

    `depth_ratios` are the exits' depths divided by the model's depth.
    """

    def __init__(self, depth_ratios: Sequence[float]) -> None:
        self._depth_ratios = depth_ratios
        self._blocks = [(Tally(SECONDS), Tally(ROWS)) for _ in depth_ratios]
        self._depths = Tally(depth_ratios)

    def observe(self, reports: Sequence[StepReport], events: Sequence[Event]) -> None:
        """Record one turn of the engine. Each pass counts with the mean duration and mean rows of its report."""
        for block, num_passes, num_rows, total_seconds in reports:
            seconds, rows = self._blocks[block - 1]
            seconds.observe(total_seconds / num_passes, num_passes)
            rows.observe(num_rows / num_passes, num_passes)
        for event in events:
            if isinstance(event, TokenEvent):
                self._depths.observe(self._depth_ratios[event.exit - 1])

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("nvium_generated_tokens", "Emitted tokens by exit.", labels=["exit"])
        for number, count in enumerate(self._depths.counts[:-1], start=1):
            tokens.add_metric([str(number)], count)
        depths = HistogramMetricFamily(
            "nvium_exit_depth_ratio", "Depth of a token's exit divided by the depth of the last exit."
        )
        self._depths.add_to(depths)
        steps = CounterMetricFamily("nvium_steps", "Passes by block.", labels=["block"])
        step_seconds = HistogramMetricFamily("nvium_step_seconds", "Duration of a pass by block.", labels=["block"])
        step_rows = HistogramMetricFamily("nvium_step_rows", "Rows of a pass, with piggybacked rows.", labels=["block"])
        for number, (seconds, rows) in enumerate(self._blocks, start=1):
            steps.add_metric([str(number)], sum(rows.counts))
            seconds.add_to(step_seconds, [str(number)])
            rows.add_to(step_rows, [str(number)])
        yield from (tokens, depths, steps, step_seconds, step_rows)
