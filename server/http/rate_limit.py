"""Limits each key's requests in any 60 seconds, and sends OpenAI's headers. Without keys, all clients share a limit."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import Rejected
from server.http.middleware import HttpMiddleware, refuse
from server.http.paths import is_free

WINDOW_SECONDS = 60


class RateLimit(HttpMiddleware):
    """Answers 429 before the body is read. Refused requests and requests that cost nothing do not count.

    Stores the times of at most `requests_per_minute` requests per key. `clock` returns monotonic seconds.
    """

    def __init__(self, app: ASGIApp, requests_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(app)
        self._clock = clock
        self._per_minute = requests_per_minute
        self.times = defaultdict[str, deque[float]](deque)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_free(scope):
            await self.app(scope, receive, send)
            return
        now, times = self._clock(), self.times[scope["state"]["record"].key_id]
        is_accepted = self._accept(now, times)
        remaining = self._per_minute - len(times)
        seconds = times[0] + WINDOW_SECONDS - now  # time until the oldest counted request leaves the window

        async def limited_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-ratelimit-limit-requests"] = str(self._per_minute)
                headers["x-ratelimit-remaining-requests"] = str(remaining)
                headers["x-ratelimit-reset-requests"] = f"{seconds:.3f}s"
            await send(message)

        if is_accepted:
            await self.app(scope, receive, limited_send)
        else:
            retry = math.ceil(seconds)
            message = f"the rate limit of {self._per_minute:,} per minute is exceeded; retry in {retry} s"
            error = Rejected("rate_limit_exceeded", message, retry_after_seconds=retry)
            await refuse(error, scope, receive, limited_send)

    def _accept(self, now: float, times: deque[float]) -> bool:
        """Remove times outside the window. Add this request and return True if it is within the limit."""
        while times and times[0] <= now - WINDOW_SECONDS:
            times.popleft()
        if len(times) == self._per_minute:
            return False
        times.append(now)
        return True
