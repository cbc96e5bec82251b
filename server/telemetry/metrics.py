"""The Prometheus metrics of one app, in a registry of its own. No label takes a value from a request."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nvium_core import WorkerState
from server.telemetry.sink import sink
from server.telemetry.steps import StepMetrics
from server.version import version

EndReason = Literal["stop", "length", "tool_calls", "abort"]
"""Why a choice ended; `abort` if its request ended first, for any reason."""

Outcome = Literal["completed", "invalid", "rejected", "cancelled", "failed"]

REASONS = (
    "bodies_too_large",
    "body_too_large",
    "deadline_exceeded",
    "draining",
    "engine_stopped",
    "head_too_large",
    "host_not_allowed",
    "invalid_api_key",
    "malformed_request",
    "no_replica",
    "origin_not_allowed",
    "queue_full",
    "rate_limit_exceeded",
    "request_timeout",
    "too_many_connections",
    "unsupported_body",
)
"""Codes of errors that reject a request, or a connection before it."""

STATUSES = (200, 400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 503)
"""HTTP status of answers; 499 if the client had disconnected."""

FROM_1_MS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OF_TOKENS = (0.0001, 0.00025, 0.0005, *FROM_1_MS)
OF_REQUESTS = (*FROM_1_MS, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Token-count buckets: 1, 2, 5, 10 and so on."""


class Metrics:
    """`depth_ratios` are the exits' depths divided by the model's; `latency_buckets` replace those of every latency.

    Requests are observed on the event loop, Steps (by `steps`) where the engine is observed.
    """

    def __init__(self, depth_ratios: Sequence[float], latency_buckets: Sequence[float] = ()) -> None:
        self.registry = CollectorRegistry()
        self._add_counters()
        self._add_histograms(latency_buckets)
        self.steps = StepMetrics(depth_ratios)
        self.registry.register(self.steps)
        self.registry.register(LogCollector())
        ProcessCollector(registry=self.registry)
        Info("nvium_build", "The program.", registry=self.registry).info({"version": version()})

    def _add_counters(self) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=self.registry)

        self.requests = counter("nvium_requests", "Requests by how they ended.", "endpoint", "outcome")
        self.responses = counter("nvium_responses", "Answers by their HTTP status.", "endpoint", "status")
        self.finished_choices = counter("nvium_finished_choices", "Choices by why they ended.", "finish_reason")
        self.rejected = counter("nvium_rejected", "Requests rejected.", "reason")
        self.prompt_tokens = counter("nvium_prompt_tokens", "Prompt tokens of admitted requests.")
        self.key_tokens = counter("nvium_key_tokens", "Tokens by API key and kind: prompt or generated.", "key", "kind")
        self.moved_requests = counter("nvium_moved_requests", "Requests retried when a replica was lost.")
        self.broken_streams = counter("nvium_broken_streams", "Streams ended by the loss of a replica.")

    def _add_histograms(self, latency_buckets: Sequence[float]) -> None:
        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, registry=self.registry, buckets=buckets)

        of_requests, of_tokens = latency_buckets or OF_REQUESTS, latency_buckets or OF_TOKENS
        self.time_to_first_token = histogram(
            "nvium_time_to_first_token_seconds", "From a request's arrival to its first token.", of_requests
        )
        self.inter_token_latency = histogram(
            "nvium_inter_token_latency_seconds",
            "Between tokens of a choice; those that arrive together share the time.",
            of_tokens,
        )
        self.request_latency = histogram(
            "nvium_request_latency_seconds", "From a request's arrival to the end of its answer.", of_requests
        )
        self.queue_time = histogram(
            "nvium_queue_seconds", "From a choice's submission to its leaving the queue.", of_requests
        )
        self.request_prompt_tokens = histogram(
            "nvium_request_prompt_tokens", "Tokens of a completed request's prompts.", LENGTHS
        )
        self.request_generated_tokens = histogram(
            "nvium_request_generated_tokens", "Tokens of all choices of a completed request.", LENGTHS
        )

    def foresee(self, endpoints: Iterable[str]) -> None:
        """Create all series at zero: an increase is only visible in a series that existed before."""
        for endpoint in endpoints:
            for outcome in get_args(Outcome):
                self.requests.labels(endpoint, outcome)
            for status in STATUSES:
                self.responses.labels(endpoint, status)
        for reason in get_args(EndReason):
            self.finished_choices.labels(reason)
        for reason in REASONS:
            self.rejected.labels(reason)

    def introduce(self, model: Mapping[str, str], num_seats: int) -> None:
        """Add what is served, and how many sequences may run at once."""
        Info("nvium_model", "What is served.", registry=self.registry).info(dict(model))
        Gauge("nvium_seats", "Sequences that may run at once.", registry=self.registry).set(num_seats)

    def watch(self, state: Callable[[], WorkerState], heartbeat_age: Callable[[], float]) -> None:
        """Report the engine's state, and its age in seconds, at every scrape."""
        self.registry.register(WorkerCollector(state, heartbeat_age))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class LogCollector(Collector):
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
            "Tokens per second of the running schedule over those of whole passes, as measured while serving.",
            state.piggyback_speedup,
        )
        yield CounterMetricFamily("nvium_preemptions", "Sequences that lost their cache.", state.num_preemptions)
        yield CounterMetricFamily(
            "nvium_draft_tokens", "Tokens that were drafted for the last exit, by whatever.", state.num_draft_tokens
        )
        yield CounterMetricFamily(
            "nvium_accepted_draft_tokens",
            "Drafts that were the last exit's own tokens, and were emitted.",
            state.num_accepted_draft_tokens,
        )
        yield CounterMetricFamily(
            "nvium_cached_prompt_tokens", "Rows taken from the cache of prefixes.", state.num_cached_prompt_tokens
        )
