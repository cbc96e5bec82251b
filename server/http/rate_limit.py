"""A limit on each key's requests in any 60 seconds, with OpenAI's headers. Without keys all clients share it."""

import math
import time

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import RateLimited
from server.http.keys import is_metrics, is_public
from server.http.middleware import refuse
from server.telemetry.metrics import Metrics


class RateLimit:
    """Answers 429 before a body is read. Public routes, /metrics and refused requests are not counted.

    Keeps the times of at most `requests_per_minute` requests for each key.
    """

    def __init__(self, app: ASGIApp, requests_per_minute: int, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._limit = RateLimitItemPerMinute(requests_per_minute)
        self.storage = MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self.storage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope) or is_metrics(scope):
            await self._app(scope, receive, send)
            return
        key_id: str = scope["state"]["key_id"]
        is_accepted = self._limiter.hit(self._limit, key_id)
        remaining, seconds = self._window(key_id)

        async def limited_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._tell(MutableHeaders(scope=message), remaining, seconds)
            await send(message)

        if is_accepted:
            await self._app(scope, receive, limited_send)
        else:
            error = RateLimited(self._limit.amount, retry_after_seconds=max(1, math.ceil(seconds)))
            await refuse(error, self._metrics, scope, receive, limited_send)

    def _window(self, key_id: str) -> tuple[int, float]:
        """Requests left, and seconds until the oldest counted request leaves the window."""
        window = self._limiter.get_window_stats(self._limit, key_id)
        return window.remaining, max(0.0, window.reset_time - time.time())

    def _tell(self, headers: MutableHeaders, remaining: int, seconds: float) -> None:
        headers["x-ratelimit-limit-requests"] = str(self._limit.amount)
        headers["x-ratelimit-remaining-requests"] = str(remaining)
        headers["x-ratelimit-reset-requests"] = f"{seconds:.3f}s"
