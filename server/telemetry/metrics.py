"""The Prometheus metrics of one app, in its own registry. No label takes its value from a request."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nvium_core import EngineWorker, Event, StepReport, TokenEvent
from nvium_core.text.sandbox import HELPERS
from server.errors import REJECTIONS
from server.schemas.generation import AnswerEnd
from server.telemetry.logs import sink

EndReason = Literal[AnswerEnd, "abort"]
"""Why a choice ended. `abort` means that the request ended before the choice."""

Outcome = Literal["completed", "invalid", "rejected", "cancelled", "failed"]

STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 503)
"""HTTP status codes of responses. 499 means that the client disconnected first."""

FROM_1_MS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OF_TOKENS = (0.0001, 0.00025, 0.0005, *FROM_1_MS)
OF_REQUESTS = (*FROM_1_MS, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Buckets for token counts: 1, 2, 5, 10 up to 500,000."""

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

SPEEDUP = "Throughput of the running schedule divided by the throughput of whole passes, measured while serving."
HEARTBEAT_AGE = "Time since the device thread's last Step, or since it last found no work."


class Metrics(Collector):
    """All metrics of a server or gateway.

    `latency_buckets` replace the default buckets of all latencies. The event loop observes requests.
    """

    def __init__(self, latency_buckets: Sequence[float] = ()) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        Info("nvium_build", "Version of nvium.", registry=self.registry).info({"version": version("nvium")})

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=self.registry)

        self.requests = counter("nvium_requests", "Requests by outcome.", "endpoint", "outcome")
        self.responses = counter("nvium_responses", "Responses by HTTP status.", "endpoint", "status")
        self.finished_choices = counter("nvium_finished_choices", "Choices by finish reason.", "finish_reason")
        self.rejected = counter("nvium_rejected", "Requests rejected.", "reason")
        self.prompt_tokens = counter("nvium_prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_prompt_tokens = counter("nvium_cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.key_tokens = counter("nvium_key_tokens", "Tokens by API key and kind: prompt or generated.", "key", "kind")
        self.moved_requests = counter("nvium_moved_requests", "Requests retried after a replica was lost.")
        self.replica_restarts = counter("nvium_replica_restarts", "Replicas that ended and were started again.")
        self.evicted_connections = counter("nvium_evicted_connections", "Waiting connections closed to make room.")
        self.broken_streams = counter("nvium_broken_streams", "Streams ended by the loss of a replica.")

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, registry=self.registry, buckets=buckets)

        of_requests, of_tokens = latency_buckets or OF_REQUESTS, latency_buckets or OF_TOKENS
        self.time_to_first_token = histogram(
            "nvium_time_to_first_token_seconds", "Time from a request's arrival to its first token.", of_requests
        )
        self.inter_token_latency = Tally(of_tokens)
        self.request_latency = histogram(
            "nvium_request_latency_seconds", "Time from a request's arrival to the end of its response.", of_requests
        )
        self.queue_time = histogram("nvium_queue_seconds", "Time that a choice waits in the queue.", of_requests)
        self.request_prompt_tokens = histogram(
            "nvium_request_prompt_tokens", "Prompt tokens of a completed request.", LENGTHS
        )
        self.request_generated_tokens = histogram(
            "nvium_request_generated_tokens", "Generated tokens of a completed request, over all choices.", LENGTHS
        )

    def create_series(self, endpoints: Iterable[str]) -> None:
        """Create the series of all labels at zero. Prometheus sees no increase in a series that starts at one."""
        for endpoint in endpoints:
            for outcome in get_args(Outcome):
                self.requests.labels(endpoint, outcome)
            for status in STATUSES:
                self.responses.labels(endpoint, status)
        for reason in get_args(EndReason):
            self.finished_choices.labels(reason)
        for code in REJECTIONS:
            self.rejected.labels(code)

    def add_model(self, model: Mapping[str, str], num_seats: int) -> None:
        Info("nvium_model", "The served model.", registry=self.registry).info(dict(model))
        Gauge("nvium_seats", "Maximum number of running sequences.", registry=self.registry).set(num_seats)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("nvium_helpers", "Helper processes.", len(HELPERS))
        yield GaugeMetricFamily("nvium_helper_memory_bytes", "Memory of forked helpers.", HELPERS.num_forked_bytes)
        yield CounterMetricFamily("nvium_killed_helpers", "Helpers killed: no answer, or memory.", HELPERS.num_killed)
        yield CounterMetricFamily("nvium_dropped_log_lines", "Log lines that could not be written.", sink.num_dropped)
        about = "Time between tokens of a choice. Tokens that arrive together share the time."
        latency = HistogramMetricFamily("nvium_inter_token_latency_seconds", about)
        self.inter_token_latency.add_to(latency)
        yield latency


class Tally:
    """A histogram without labels or locks, updated by one thread. prometheus_client's would take 20 µs per token.

    `bounds` are the buckets' upper bounds, without infinity.
    """

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


class EngineMetrics(Collector):
    """Metrics of an engine. Blocks and exits are counted from 1.

    `depth_ratios` are the exits' depths divided by the model's depth. Set `worker` before the first scrape.
    """

    worker: EngineWorker

    def __init__(self, depth_ratios: Sequence[float], registry: CollectorRegistry) -> None:
        self._depth_ratios = depth_ratios
        self._blocks = [(Tally(SECONDS), Tally(ROWS)) for _ in depth_ratios]
        self._depths = Tally(depth_ratios)
        registry.register(self)

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
        steps = CounterMetricFamily("nvium_steps", "Passes by block.", labels=["block"])
        step_seconds = HistogramMetricFamily("nvium_step_seconds", "Duration of a pass by block.", labels=["block"])
        step_rows = HistogramMetricFamily("nvium_step_rows", "Rows of a pass, with piggybacked rows.", labels=["block"])
        for number, (seconds, rows) in enumerate(self._blocks, start=1):
            steps.add_metric([str(number)], sum(rows.counts))
            seconds.add_to(step_seconds, [str(number)])
            rows.add_to(step_rows, [str(number)])
        depths = HistogramMetricFamily("nvium_exit_depth_ratio", "Depth of a token's exit divided by the last exit's.")
        self._depths.add_to(depths)
        yield from (tokens, steps, step_seconds, step_rows, depths)
        state = self.worker.state  # one snapshot, so that the metrics are consistent
        for name, about, value in (
            ("nvium_requests_running", "Running sequences.", state.num_running),
            ("nvium_requests_waiting", "Waiting sequences.", state.num_waiting),
            ("nvium_deferred_rows", "Rows that have not passed their upper blocks.", state.num_deferred_rows),
            ("nvium_kv_cache_usage_ratio", "Share of cache pages in use.", state.kv_cache_usage),
            ("nvium_piggyback_speedup_ratio", SPEEDUP, state.piggyback_speedup),
            ("nvium_device_heartbeat_age_seconds", HEARTBEAT_AGE, self.worker.seconds_since_progress),
        ):
            yield GaugeMetricFamily(name, about, value)
        for name, about, value in (
            ("nvium_preemptions", "Sequences preempted.", state.num_preemptions),
            ("nvium_eager_passes", "Passes in PyTorch's operators.", sum(state.eager_passes.values())),
            ("nvium_draft_tokens", "Draft tokens proposed to the last exit.", state.num_draft_tokens),
            ("nvium_accepted_draft_tokens", "Draft tokens accepted and emitted.", state.num_accepted_draft_tokens),
        ):
            yield CounterMetricFamily(name, about, value)
