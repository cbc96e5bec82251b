"""The Prometheus metrics of one app, in a registry of its own. No label takes a value from a request."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nvium_core import StepReport, TokenEvent, WorkerState
from server.telemetry.sink import sink

STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Outcome = Literal["completed", "invalid", "rejected", "cancelled", "failed"]

REASONS = (
    "bodies_too_large",
    "body_too_large",
    "deadline_exceeded",
    "draining",
    "engine_stopped",
    "invalid_api_key",
    "no_replica",
    "queue_full",
    "rate_limit_exceeded",
)
"""Codes of the errors that turn a request away."""


class Metrics:
    """`depth_ratios` are the depths of the exits over that of the model.

    Requests are observed on the event loop, Steps on the device thread.
    """

    def __init__(self, depth_ratios: Sequence[float], latency_buckets: Sequence[float]) -> None:
        self.registry = CollectorRegistry()
        self._depth_ratios = depth_ratios
        self._add_request_metrics(latency_buckets)
        self._add_token_metrics()
        self._add_step_metrics()
        exits = range(1, len(depth_ratios) + 1)
        self.registry.register(LogCollector())
        self._tokens_by_exit = {number: self.generated_tokens.labels(number) for number in exits}
        self._steps_by_block = {
            number: (self.steps.labels(number), self.step_time.labels(number), self.step_rows.labels(number))
            for number in exits
        }

    def _add_request_metrics(self, buckets: Sequence[float]) -> None:
        registry = self.registry
        self.requests = Counter(
            "nvium_requests", "Requests by how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self.rejected = Counter("nvium_rejected", "Requests turned away.", ["reason"], registry=registry)
        self.time_to_first_token = Histogram(
            "nvium_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=buckets,
        )
        self.inter_token_latency = Histogram(
            "nvium_inter_token_latency_seconds",
            "Between tokens of a choice; those that arrive together share the time.",
            registry=registry,
            buckets=buckets,
        )
        self.request_latency = Histogram(
            "nvium_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            registry=registry,
            buckets=buckets,
        )
        self.queue_time = Histogram(
            "nvium_queue_seconds",
            "From a choice's submission to its leaving the queue.",
            registry=registry,
            buckets=buckets,
        )

    def _add_token_metrics(self) -> None:
        registry = self.registry
        self.prompt_tokens = Counter("nvium_prompt_tokens", "Prompt tokens of admitted requests.", registry=registry)
        self.generated_tokens = Counter(
            "nvium_generated_tokens", "Tokens spoken, by exit.", ["exit"], registry=registry
        )
        self.exit_depth_ratio = Histogram(
            "nvium_exit_depth_ratio",
            "Depth of the exit that spoke a token, as a share of all layers.",
            registry=registry,
            buckets=self._depth_ratios,
        )

    def _add_step_metrics(self) -> None:
        registry = self.registry
        self.steps = Counter("nvium_steps", "Steps, by block.", ["block"], registry=registry)
        self.step_time = Histogram(
            "nvium_step_seconds", "Time of a Step.", ["block"], registry=registry, buckets=STEP_BUCKETS
        )
        self.step_rows = Histogram(
            "nvium_step_rows",
            "Rows of a Step, piggybacked ones included.",
            ["block"],
            registry=registry,
            buckets=ROW_BUCKETS,
        )

    def observe_step(self, report: StepReport) -> None:
        """Called on the device thread."""
        steps, seconds, rows = self._steps_by_block[report.block]
        steps.inc()
        seconds.observe(report.seconds)
        rows.observe(report.num_rows)
        for event in report.events:
            if isinstance(event, TokenEvent):
                self._tokens_by_exit[event.exit].inc()
                self.exit_depth_ratio.observe(self._depth_ratios[event.exit - 1])

    def foresee(self, endpoints: Iterable[str]) -> None:
        """Show at zero whatever may be counted, as growth is only seen of a series that was there before."""
        for endpoint, outcome in product(endpoints, get_args(Outcome)):
            self.requests.labels(endpoint, outcome)
        for reason in REASONS:
            self.rejected.labels(reason)

    def watch(self, state: Callable[[], WorkerState], heartbeat_age: Callable[[], float]) -> None:
        """Report the device thread's own view of the engine, and how old that is in seconds, at every scrape."""
        self.registry.register(WorkerCollector(state, heartbeat_age))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class LogCollector(Collector):
    """What could not be logged, which no line can say."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("nvium_dropped_log_lines", "Log lines that could not be written.", sink.num_dropped)


class WorkerCollector(Collector):
    """Gauges from one snapshot, so that they agree with each other."""

    def __init__(self, state: Callable[[], WorkerState], heartbeat_age: Callable[[], float]) -> None:
        self._state = state
        self._heartbeat_age = heartbeat_age

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield GaugeMetricFamily(
            "nvium_device_heartbeat_age_seconds",
            "Since the device thread's last Step, or since it last looked for work and found none.",
            self._heartbeat_age(),
        )
        yield GaugeMetricFamily("nvium_requests_running", "Sequences in the running set.", state.num_running)
        yield GaugeMetricFamily("nvium_requests_waiting", "Sequences that wait to run.", state.num_waiting)
        yield GaugeMetricFamily("nvium_deferred_rows", "Rows whose upper blocks are put off.", state.num_deferred_rows)
        yield GaugeMetricFamily("nvium_kv_cache_usage_ratio", "Share of cache pages in use.", state.kv_cache_usage)
        yield GaugeMetricFamily(
            "nvium_piggyback_speedup_ratio",
            "Time the same tokens would have taken block by block at full depth, over time spent, in the last minute.",
            state.piggyback_speedup,
        )
        yield CounterMetricFamily("nvium_preemptions", "Sequences that lost their cache.", state.num_preemptions)
        yield CounterMetricFamily(
            "nvium_cached_prompt_tokens", "Rows taken from the cache of prefixes.", state.num_cached_prompt_tokens
        )
