"""What happened to one request: timed as it happens, counted and logged in one line at its end. Holds no text."""

import time
from collections import Counter

import structlog

from nvium_core import TokenEvent
from server.errors import ApiError
from server.metrics import Metrics

REJECTED = (413, 429, 503)

ABORTED = ("disconnected", "slow_client")

log = structlog.get_logger("nvium.request")


class RequestRecord:
    """Opened when a request arrives, closed when its answer is out or its client gone."""

    def __init__(self, metrics: Metrics, *, request_id: str, endpoint: str) -> None:
        self._metrics = metrics
        self.request_id = request_id
        self.endpoint = endpoint
        self.user: str | None = None
        self.arrived = time.monotonic()
        self.status: int | None = None
        self.finish_reasons: list[str] = []
        self.abort_cause: str | None = None
        self.num_prompt_tokens = 0
        self.exit_counts: Counter[int] = Counter()
        self.queue_seconds: float | None = None
        self.first_token_seconds: float | None = None

    def admitted(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def left_queue(self, seconds: float) -> None:
        """A choice began to run; the request's own wait is that of its first."""
        self._metrics.queue_time.observe(seconds)
        self.queue_seconds = seconds if self.queue_seconds is None else min(seconds, self.queue_seconds)

    def first_tokens(self, now: float) -> None:
        """A choice spoke for the first time."""
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.arrived
            self._metrics.time_to_first_token.observe(self.first_token_seconds)

    def later_tokens(self, num_tokens: int, gap: float) -> None:
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe(gap / num_tokens)

    def served(self, tokens: list[TokenEvent], finish_reason: str | None) -> None:
        self.exit_counts.update(event.exit for event in tokens)
        if finish_reason:
            self.finish_reasons.append(finish_reason)

    def refused(self, error: ApiError) -> None:
        """Answered with an error before the status line, or with one in the stream."""
        self.abort_cause = error.code or error.type
        if error.status in REJECTED and error.code:
            self._metrics.rejected.labels(error.code).inc()

    def aborted(self, cause: str) -> None:
        """The answer ends before its end, for the client's sake: `disconnected` or `slow_client`."""
        self.abort_cause = cause

    @property
    def outcome(self) -> str:
        if self.status is None or self.abort_cause in ABORTED:
            return "cancelled"
        if self.status in REJECTED:
            return "rejected"
        if self.status >= 500 or (self.status < 400 and self.abort_cause):
            return "failed"
        return "invalid" if self.status >= 400 else "completed"

    def close(self) -> None:
        total = time.monotonic() - self.arrived
        self._metrics.requests.labels(self.endpoint, self.outcome).inc()
        if self.outcome == "completed":
            self._metrics.request_latency.observe(total)
        log.info(
            "request",
            request_id=self.request_id,
            endpoint=self.endpoint,
            user=self.user,
            outcome=self.outcome,
            status=self.status,
            finish=self.finish_reasons,
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.exit_counts.total(),
            exit_counts=dict(sorted(self.exit_counts.items())),
            queue_seconds=rounded(self.queue_seconds),
            first_token_seconds=rounded(self.first_token_seconds),
            total_seconds=rounded(total),
            abort_cause=self.abort_cause,
        )


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
