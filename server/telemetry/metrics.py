"""The Prometheus metrics of one app, in a registry of its own. No label takes a value from a request."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nvium_core import WorkerState
from server.telemetry.sink import sink
from server.telemetry.steps import StepMetrics

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
"""Codes of errors that reject a request."""


class Metrics:
    """`depth_ratios` are the exits' depths divided by the model's.

    Requests are observed on the event loop, Steps (by `steps`) where the engine is observed.
    """

    def __init__(self, depth_ratios: Sequence[float], latency_buckets: Sequence[float]) -> None:
        self.registry = CollectorRegistry()
        self._add_request_metrics(latency_buckets)
        self.prompt_tokens = Counter(
            "nvium_prompt_tokens", "Prompt tokens of admitted requests.", registry=self.registry
        )
        self.steps = StepMetrics(depth_ratios)
        self.registry.register(self.steps)
        self.registry.register(LogCollector())

    def _add_request_metrics(self, buckets: Sequence[float]) -> None:
        registry = self.registry
        self.requests = Counter(
            "nvium_requests", "Requests by how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self.rejected = Counter("nvium_rejected", "Requests rejected.", ["reason"], registry=registry)
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

    def foresee(self, endpoints: Iterable[str]) -> None:
        """Create all series at zero: an increase is only visible in a series that existed before."""
        for endpoint, outcome in product(endpoints, get_args(Outcome)):
            self.requests.labels(endpoint, outcome)
        for reason in REASONS:
            self.rejected.labels(reason)

    def watch(self, state: Callable[[], WorkerState], heartbeat_age: Callable[[], float]) -> None:
        """Report the engine's state, and its age in seconds, at every scrape."""
        self.registry.register(WorkerCollector(state, heartbeat_age))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class LogCollector(Collector):
    """Lost log lines."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("nvium_dropped_log_lines", "Log lines that could not be written.", sink.num_dropped)


class WorkerCollector(Collector):
    """Gauges from one snapshot, so that they are consistent."""

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
