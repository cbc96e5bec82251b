"""Sends a workload to a server and notes when what came back. Knows HTTP and server-sent events, judges nothing.

Times are seconds since the start of the run. In the open loop a request's clock starts when it was due, not when
this process got round to sending it, so a client that falls behind cannot flatter the server.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from loadtest.workload import Request, Workload

DONE = "data: [DONE]"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A streamed chunk: when it came, and how many tokens it held."""

    time: float
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One request as its user saw it. `error` says what went wrong, None if nothing did."""

    due: float
    finished: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_reported_tokens: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens: as the server counts them, else as they were seen."""
        return self._num_seen if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def latency(self) -> float:
        return self.finished - self.due

    @property
    def time_to_first_token(self) -> float | None:
        return self.arrivals[0].time - self.due if self.arrivals else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """One per token after the first chunk: a chunk's gap divided among its tokens.

        Where chunks do not say how many tokens they hold, the whole time is divided among the reported tokens.
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


Send = Callable[[Request, float], Coroutine[None, None, None]]
"""Sends a request that was due at a time."""


class ServerError(Exception):
    """The server refused a request or broke it off."""


class LoadClient:
    """Runs workloads against one server. The clock starts with `run`."""

    def __init__(self, http: httpx.AsyncClient, *, model: str = "default") -> None:
        self.http = http
        self.model = model
        self._start = 0.0

    async def run(self, workload: Workload, on_done: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
        """Outcomes in order of completion; `on_done` hears of each as it comes."""
        outcomes: list[Outcome] = []

        async def send(request: Request, due: float) -> None:
            outcomes.append(await self.send(request, due))
            on_done(outcomes[-1])

        self._start = time.perf_counter()
        drive = self._closed_loop if workload.rate is None else self._open_loop
        await drive(workload, send)
        return outcomes

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def _closed_loop(self, workload: Workload, send: Send) -> None:
        requests = workload.requests()

        async def user() -> None:
            for request in requests:
                await send(request, self.now())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(workload.concurrency, workload.num_requests)):
                users.create_task(user())

    async def _open_loop(self, workload: Workload, send: Send) -> None:
        async with asyncio.TaskGroup() as sent:
            for request in workload.requests():
                await asyncio.sleep(request.arrival - self.now())
                sent.create_task(send(request, request.arrival))

    async def send(self, request: Request, due: float) -> Outcome:
        """One streamed completion, whatever becomes of it."""
        outcome = Outcome(due=due)
        try:
            async for chunk in self._chunks(request):
                self._note(chunk, outcome)
        except (httpx.HTTPError, ServerError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        outcome.finished = self.now()
        return outcome

    async def _chunks(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                raise ServerError(f"{response.status_code} {_message(await response.aread())}")
            last = ""
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: ") and line != DONE:
                    yield _parse(line.removeprefix("data: "))
        if last != DONE:
            raise ServerError(f"the stream ended without {DONE}")

    def _note(self, chunk: dict[str, Any], outcome: Outcome) -> None:
        if usage := chunk.get("usage"):
            outcome.num_prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.num_reported_tokens = usage.get("completion_tokens")
        for choice in chunk.get("choices", ()):
            metadata = choice.get("nvium") or {}
            num_tokens = len(metadata["token_ids"]) if "token_ids" in metadata else int(bool(choice.get("text")))
            outcome.exits += metadata.get("exits", [])
            if num_tokens:
                outcome.arrivals.append(Arrival(self.now(), num_tokens))


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ServerError("a chunk is not JSON") from error
    if not isinstance(chunk, dict):
        raise ServerError("a chunk is not a JSON object")
    if "error" in chunk:
        raise ServerError(_message(data))
    return chunk


def _message(body: str | bytes) -> str:
    """The message of an error in OpenAI's form, or nothing."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
