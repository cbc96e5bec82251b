import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message

from server.event_stream import EventStream

Sent = list[bytes]


async def slow_events(pause: float) -> AsyncIterator[str]:
    yield "1"
    await asyncio.sleep(pause)
    yield "2"


async def answered(pause: float, leave_after: float = 60) -> tuple[Sent, list[str]]:
    """What was sent, and what was called back."""
    sent: Sent = []
    calls: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.sleep(leave_after)
        return {"type": "http.disconnect"}

    stream = EventStream(
        slow_events(pause),
        headers={},
        keep_alive_seconds=0.05,
        on_disconnect=lambda: calls.append("disconnect"),
        on_close=lambda: calls.append("close"),
    )
    await stream({"type": "http"}, receive, send)
    return sent, calls


async def test_a_waiting_stream_says_that_it_lives() -> None:
    sent, calls = await answered(pause=0.18)
    assert sent[:2] == [b"", b"data: 1\n\n"]
    assert set(sent[2:-2]) == {b": keep-alive\n\n"}
    assert sent[-2:] == [b"data: 2\n\n", b""]
    assert calls == ["close"]


async def test_a_stream_that_does_not_wait_says_nothing_else() -> None:
    sent, _ = await answered(pause=0)
    assert sent == [b"", b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_a_stream_ends_when_its_client_goes() -> None:
    sent, calls = await answered(pause=60, leave_after=0.02)
    assert sent == [b"", b"data: 1\n\n"]
    assert calls == ["disconnect", "close"]


async def test_silence_is_broken_after_the_interval_whenever_it_began() -> None:
    times: list[float] = []

    async def early_then_silent() -> AsyncIterator[str]:
        await asyncio.sleep(0.05)
        yield "1"
        await asyncio.sleep(60)

    async def send(message: Message) -> None:
        times.append(asyncio.get_running_loop().time())

    async def receive() -> Message:
        await asyncio.sleep(0.6)
        return {"type": "http.disconnect"}

    await EventStream(
        early_then_silent(), headers={}, keep_alive_seconds=0.2, on_disconnect=lambda: None, on_close=lambda: None
    )({"type": "http"}, receive, send)
    _, event, comment, *_ = times
    assert 0.15 < comment - event < 0.35
