"""The record of one request. When the request ends, metrics count it and one log line shows it. It has no text."""

import re
import time
from collections import Counter

import structlog

from nvium_core import TokenEvent
from server.errors import REJECTIONS, ApiError
from server.telemetry.metrics import EndReason, Metrics, Outcome

OTHER = "other"
"""The endpoint of requests that no route records by name, and of those refused before they reach a route."""

CLIENT_CLOSED_REQUEST = 499  # status of a request whose client disconnected before the response
FIELD = re.compile(r"[a-z0-9_.\[\]]{1,80}")  # matches the path of a request's field

TARGET = re.compile(r"[A-Z]{1,10} [A-Za-z0-9._~:/-]{1,200}")
"""Matches a method and a path that are safe to log."""

log = structlog.get_logger("nvium.request")


class RequestRecord:
    """The times, tokens and outcome of one request.

    If `is_passed_on`, another process counts and logs the request.

    Times are by `time.monotonic()`. Each is the time at which the first choice reached the stage, or None before that.
    """

    def __init__(self, metrics: Metrics, *, request_id: str) -> None:
        self._metrics = metrics
        self.request_id = request_id
        self.endpoint = OTHER
        self.target: str | None = None
        """The method and path of a request to no endpoint in particular."""
        self.key_id = ""
        self.user: str | None = None
        self.status: int | None = None
        self.finish_reasons: list[str] = []
        self.abort_cause: str | None = None
        self.error: ApiError | None = None
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens: int | None = None
        self.is_passed_on = False
        self.exit_counts: Counter[int] = Counter()
        self.arrived_at = time.monotonic()
        self.queued_at: float | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None

    def admitted(self, num_prompt_tokens: int) -> None:
        """Record that all choices are in the engine's queue."""
        self.queued_at = time.monotonic()
        self.num_prompt_tokens = num_prompt_tokens
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def left_queue(self, seconds: float, num_cached_prompt_tokens: int) -> None:
        """Record that a choice started after `seconds` in the queue, with this many tokens from the prefix cache."""
        assert self.queued_at is not None
        seconds = max(0.0, seconds)  # the engine may start a choice before its submission is timed
        self._metrics.queue_time.observe(seconds)
        self._metrics.cached_prompt_tokens.inc(num_cached_prompt_tokens)
        started_at = self.queued_at + seconds
        self.started_at = started_at if self.started_at is None else min(started_at, self.started_at)
        self.num_cached_prompt_tokens = num_cached_prompt_tokens + (self.num_cached_prompt_tokens or 0)

    def tokens_arrived(self, num_tokens: int, now: float, previous: float | None) -> None:
        """Record tokens that arrived together. `previous` is the arrival of the choice's previous tokens, if any."""
        if previous is not None:
            self._metrics.inter_token_latency.observe((now - previous) / num_tokens, num_tokens)
        elif self.first_token_at is None:
            self.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self.arrived_at)

    def served(self, tokens: list[TokenEvent]) -> None:
        for event in tokens:
            self.exit_counts[event.exit] += 1

    def choice_ended(self, reason: EndReason) -> None:
        self._metrics.finished_choices.labels(reason).inc()
        if reason != "abort":
            self.finish_reasons.append(reason)

    def refused(self, error: ApiError) -> None:
        """Record an error that was sent to the client, as the response or within a stream."""
        self.error, self.abort_cause = error, error.code or error.type
        if error.code in REJECTIONS:
            self._metrics.rejected.labels(error.code).inc()

    def aborted(self, cause: str) -> None:
        """Record that the client ended the response early: `disconnected` or `slow_client`. The first cause counts."""
        self.abort_cause = self.abort_cause or cause

    @property
    def outcome(self) -> Outcome:
        if self.status is None or self.abort_cause in ("disconnected", "slow_client"):
            return "cancelled"
        if self.status >= 400 and self.error and self.error.code in REJECTIONS:
            return "rejected"
        if self.status >= 500 or (self.status < 400 and self.abort_cause):
            return "failed"
        return "invalid" if self.status >= 400 else "completed"

    def close(self, *, is_routine: bool = False) -> None:
        """Count and log the request. A routine request is logged at level `debug`, and counted only if it failed."""
        closed_at = time.monotonic()
        if self.is_passed_on:
            return
        if self.error or not is_routine:
            self._count(closed_at - self.arrived_at)
        write, param = log.debug if is_routine else log.info, self.error.param if self.error else None
        write(
            "request",
            request_id=self.request_id,
            key_id=self.key_id,
            endpoint=self.endpoint,
            target=self.target and (self.target if TARGET.fullmatch(self.target) else "?"),
            user=self.user,
            outcome=self.outcome,
            status=self.status,
            finish=self.finish_reasons,
            prompt_tokens=self.num_prompt_tokens,
            cached_prompt_tokens=self.num_cached_prompt_tokens,
            completion_tokens=self.exit_counts.total(),
            exit_counts=dict(sorted(self.exit_counts.items())),
            queue_seconds=seconds_between(self.queued_at, self.started_at),
            first_token_seconds=seconds_between(self.arrived_at, self.first_token_at),
            total_seconds=seconds_between(self.arrived_at, closed_at),
            abort_cause=self.abort_cause,
            param=param if param is None or FIELD.fullmatch(param) else "?",  # a name of the client's may be anything
            code=self.error.code if self.error else None,
        )

    def _count(self, seconds: float) -> None:
        metrics = self._metrics
        metrics.requests.labels(self.endpoint, self.outcome).inc()
        key = self.key_id or "none"
        metrics.key_tokens.labels(key, "prompt").inc(self.num_prompt_tokens)
        metrics.key_tokens.labels(key, "generated").inc(self.exit_counts.total())
        metrics.responses.labels(self.endpoint, self.status or CLIENT_CLOSED_REQUEST).inc()
        if self.outcome == "completed" and self.endpoint != OTHER:
            metrics.request_latency.observe(seconds)
            if self.num_prompt_tokens:
                metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
                metrics.request_generated_tokens.observe(self.exit_counts.total())


def seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 6)
