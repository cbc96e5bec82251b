"""Sends a workload to a server over HTTP and records when streamed tokens arrive.

Times are seconds since the start of the run. In the open loop, latency starts at the time when the request was due,
even if it was sent later. Otherwise a stalled server or a slow client would look fast.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from loadtest.workload import Workload

DONE = "[DONE]"
BROKEN = "broken stream"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a streamed chunk: its time and its number of tokens."""

    time: float
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class RequestResult:
    """The result of one request. `error` is the kind of error, or None if the request succeeded."""

    due: float
    finished: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_reported_tokens: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def num_tokens(self) -> int:
        return self._num_seen if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def latency(self) -> float:
        return self.finished - self.due

    @property
    def time_to_first_token(self) -> float | None:
        return self.arrivals[0].time - self.due if self.arrivals else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Return one latency for each token after the first chunk.

        A token's latency is the time since the previous chunk, divided by the number of tokens in the token's chunk.
        If the server does not report the tokens of each chunk, every token after the first gets the mean latency.
        """
        if self.num_tokens != self._num_seen and self.num_tokens > 1 and self.arrivals:
            whole = self.arrivals[-1].time - self.arrivals[0].time
            return [whole / (self.num_tokens - 1)] * (self.num_tokens - 1)
        return [
            (chunk.time - last.time) / chunk.num_tokens
            for last, chunk in pairwise(self.arrivals)
            for _ in range(chunk.num_tokens)
        ]

    @property
    def _num_seen(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)


OnDone = Callable[[RequestResult], object]
Fields = dict[str, Any]
Send = Callable[[Fields, float], Coroutine[None, None, None]]
"""Sends a request with these fields. The second argument is the time at which the request is due."""


class ServerError(Exception):
    """The server rejected a request or ended its response early. The arguments are the kind of error and a message."""


class LoadClient:
    """Runs workloads against one server, one at a time. Times are seconds since the last call of `run`."""

    def __init__(self, http: httpx.AsyncClient, *, model: str = "default") -> None:
        self.http = http
        self.model = model
        self._start = 0.0

    async def run(self, workload: Workload, on_done: OnDone = lambda _: None) -> list[RequestResult]:
        """Run the workload and call `on_done` with each result. Return the results in order of completion."""
        results: list[RequestResult] = []

        async def send(fields: Fields, due: float) -> None:
            result = RequestResult(due=due)
            await self.send(fields, result)
            result.finished = self.now()
            results.append(result)
            on_done(result)

        self._start = time.perf_counter()
        drive = self._closed_loop if workload.rate is None else self._open_loop
        await drive(workload, send)
        return results

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def _closed_loop(self, workload: Workload, send: Send) -> None:
        requests = workload.requests()

        async def user() -> None:
            for _, fields in requests:
                await send(fields, self.now())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(workload.concurrency, workload.num_requests)):
                users.create_task(user())

    async def _open_loop(self, workload: Workload, send: Send) -> None:
        async with asyncio.TaskGroup() as sent:
            for arrival, fields in workload.requests():
                await asyncio.sleep(arrival - self.now())
                sent.create_task(send(fields, arrival))

    async def send(self, fields: Fields, result: RequestResult) -> None:
        """Stream one completion, and record its tokens or its error in the result."""
        try:
            async for data in self._events(fields):
                _note(data, self.now(), result)
            if not result.num_tokens:
                raise ServerError("empty answer", "the server sent no token")
        except ServerError as error:
            result.error, result.message = error.args
        except Exception as error:
            result.error, result.message = type(error).__name__, str(error)

    async def _events(self, fields: Fields) -> AsyncIterator[str]:
        """Yield the data of each event except `[DONE]`. Raise `ServerError` if the request fails."""
        body = {"model": self.model, **fields, **STREAMED}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                raise ServerError(f"HTTP {response.status_code}", _message(await response.aread()))
            data = ""
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data != DONE:
                        yield data
        if data != DONE:
            raise ServerError(BROKEN, f"the stream ended without {DONE}")


def _note(data: str, time: float, result: RequestResult) -> None:
    """Record an event of the stream. Raise `ServerError` for an error event or invalid data."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerError("error in stream", _message(data))
        if usage := chunk.get("usage"):
            result.num_prompt_tokens = int(usage["prompt_tokens"])
            result.num_reported_tokens = int(usage["completion_tokens"])
        for choice in chunk.get("choices", ()):
            metadata = choice.get("nvium") or {}
            num_tokens = len(metadata["token_ids"]) if "token_ids" in metadata else int(bool(choice.get("text")))
            result.exits += map(int, metadata.get("exits", ()))
            if num_tokens:
                result.arrivals.append(Arrival(time, num_tokens))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ServerError(BROKEN, f"not a completion chunk: {data[:80]}") from error


def _message(body: str | bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
