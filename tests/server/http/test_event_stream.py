import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.types import Message

from server.http.event_stream import KEEP_ALIVE, EventStream, framed
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord

DISCONNECT: Message = {"type": "http.disconnect"}


class Source:
    """An `EventSource` of an async generator's events."""

    def __init__(self, events: AsyncIterator[list[bytes]]) -> None:
        self._events: list[bytes] = []
        self._listeners: list[Callable[[], object]] = []
        self.is_closed = False
        self._running = asyncio.create_task(self._run(events))

    def listen(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)
        self._running.add_done_callback(lambda _: listener())

    def take(self) -> list[bytes] | None:
        if self._running.done() and not self._events:
            return None
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self.is_closed = True

    async def _run(self, events: AsyncIterator[list[bytes]]) -> None:
        async for arrived in events:
            self._events += arrived
            for listener in self._listeners:
                listener()
            await asyncio.sleep(0.001)


@dataclass
class Exchange:
    """Records what an `EventStream` sends, and when.

    The client disconnects when it has `heard` a message and takes `take_seconds` to read a message.
    """

    heard: bytes | None = None
    keep_alive_seconds: float = 0.05
    take_seconds: float = 0
    sent: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    record: RequestRecord = field(default_factory=lambda: RequestRecord(Metrics(), request_id="1"))

    async def run(self, events: AsyncIterator[list[bytes]]) -> "Exchange":
        source, scope = Source(events), {"type": "http", "state": {"record": self.record}}
        await EventStream(source, headers={}, keep_alive_seconds=self.keep_alive_seconds)(
            scope, self._receive, self._send
        )
        assert source.is_closed
        return self

    async def _send(self, message: Message) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self.sent.append(message.get("body", b""))
        await asyncio.sleep(self.take_seconds)

    async def _receive(self) -> Message:
        await self.until_sent(self.heard)
        return DISCONNECT

    async def until_sent(self, message: bytes | None) -> None:
        while message not in self.sent:  # noqa: ASYNC110 (a poll is simpler than an event for each message)
            await asyncio.sleep(0.01)

    async def events_after(self, message: bytes | None, *first: bytes) -> AsyncIterator[list[bytes]]:
        """Yield the first events, wait until a message was sent, and yield two more."""
        for event in first:
            yield [event]
        await self.until_sent(message)
        yield [b"2", b"3"]


async def numbers(count: int) -> AsyncIterator[list[bytes]]:
    for number in range(count):
        yield [b"%d" % number]


async def test_a_waiting_stream_sends_keep_alives():
    exchange = Exchange()
    await exchange.run(exchange.events_after(KEEP_ALIVE, b"1"))
    assert exchange.sent[:2] == [b"", b"data: 1\n\n"]
    assert set(exchange.sent[2:-2]) == {KEEP_ALIVE}
    assert exchange.sent[-2:] == [b"data: 2\n\ndata: 3\n\n", b""]
    exchange = Exchange()
    await exchange.run(exchange.events_after(KEEP_ALIVE))
    assert exchange.sent[:2] == [b"", KEEP_ALIVE], "the first one sends the status line"


async def test_the_keep_alive_interval_begins_with_the_last_event():
    exchange = Exchange(heard=KEEP_ALIVE, keep_alive_seconds=0.2)

    async def late_then_silent() -> AsyncIterator[list[bytes]]:
        await asyncio.sleep(0.1)
        async for events in exchange.events_after(None, b"1"):
            yield events

    await exchange.run(late_then_silent())
    _, event, comment, *_ = exchange.times
    assert comment - event > 0.15


async def test_events_that_arrive_while_others_are_sent_are_sent_together():
    exchange = await Exchange(keep_alive_seconds=60, take_seconds=0.1).run(numbers(9))
    assert b"".join(exchange.sent) == b"".join(b"data: %d\n\n" % number for number in range(9))
    assert len(exchange.sent) < 9


async def test_no_keep_alive_is_sent_while_the_client_does_not_read():
    exchange = Exchange(take_seconds=0.2)
    await exchange.run(exchange.events_after(b""))
    assert exchange.sent == [b"", KEEP_ALIVE, b"data: 2\n\ndata: 3\n\n", b""]


def test_characters_that_some_clients_treat_as_line_ends_are_escaped():
    text = "a\u2028b\u2029c\u0085d\u2026é\u00a0"
    event = json.dumps({"text": text}, ensure_ascii=False).encode()
    [line] = framed([event]).decode().splitlines()[:-1]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
