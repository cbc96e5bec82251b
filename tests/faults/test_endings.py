"""How streams and the process end where nothing can be logged, where the device thread dies, and where time is up."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from nvium_core.engine.events import Event, FailureReason
from tests.faults.divisions import engine_of
from tests.faults.kinds import drops_lines
from tests.server.forked_server import forked_server
from tests.server.generating import asking
from tests.server.live_server import wait_until
from tests.server.raw_client import Answer, asked, connected, request
from tests.server.server_process import ServerProcess

LONG = 1_000


def num_tokens(stream: bytes) -> int:
    return len(Answer(200, {"content-type": "text/event-stream"}, stream).spoken()[0])


async def streamed_over_a_drain(server: ServerProcess) -> tuple[bytes, int]:
    """What a stream told that was under way when the server was told to stop, and how that ended."""
    async with connected(server.url) as connection:
        await connection.send(asking(max_tokens=LONG, stream=True))
        await connection.head()
        first = await connection.chunk()
        server.terminate()
        told = first + await connection.rest()
    return told, await asyncio.to_thread(server.exit_code, 20)


@pytest.mark.slow
async def test_a_server_whose_log_goes_to_a_full_disk_serves_and_drains(model_folder: Path) -> None:
    with forked_server(model_folder, Path("/dev/full")) as server:
        refused = await asked(server.url, b"\x00 no HTTP\r\n\r\n")
        assert (refused.status, refused.json()["error"]["code"]) == (400, "malformed_request")
        assert drops_lines(server)
        told, code = await streamed_over_a_drain(server)
    assert num_tokens(told) == LONG
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["gone", "asleep"])
async def test_a_server_whose_logs_reader_is_gone_or_asleep_finishes_its_streams(
    model_folder: Path, tmp_path: Path, reader: str
) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with forked_server(model_folder, pipe) as server:
            if reader == "gone":
                os.close(reading)
            else:
                await asyncio.gather(*(asked(server.url, b"\x00\r\n\r\n") for _ in range(500)))
            told, code = await streamed_over_a_drain(server)
    finally:
        if reader == "asleep":
            os.close(reading)
    assert num_tokens(told) == LONG
    assert code == 0


def break_the_device_thread() -> None:
    """Once a prompt begins with the token that only one request has."""
    from nvium_core import Engine  # noqa: PLC0415

    step = Engine.step

    def broken(engine: Engine) -> list[object]:
        if any(sequence.token_ids[0] == BREAKS[0] for sequence in engine.scheduler.waiting):
            raise MemoryError
        return step(engine)  # type: ignore[return-value]

    Engine.step = broken  # type: ignore[method-assign,assignment]


def lose_the_device() -> None:
    """From the first Step on in which that prompt is, every call of the device fails."""
    import torch  # noqa: PLC0415

    from nvium_core.engine.device.native.backend import NativeBackend  # noqa: PLC0415
    from nvium_core.engine.schedule.step import Step, StepResult  # noqa: PLC0415

    run, lost = NativeBackend.run, list[Step]()

    def failing(backend: NativeBackend, step: Step) -> list[StepResult]:
        if lost or any(each.sequence.token_ids[0] == BREAKS[0] for each in step.runs):
            lost.append(step)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return run(backend, step)

    NativeBackend.run = failing  # type: ignore[method-assign]


BREAKS = [200, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [break_the_device_thread, lose_the_device])
async def test_a_dead_device_or_its_thread_ends_the_process_once_everybody_has_been_told(
    model_folder: Path, tmp_path: Path, fault: Callable[[], None]
) -> None:
    with forked_server(model_folder, tmp_path / "log", prepare=fault) as server:
        async with connected(server.url) as stream, connected(server.url) as whole, connected(server.url) as probe:
            await stream.send(asking(max_tokens=3_000, stream=True))
            await whole.send(asking(max_tokens=3_000))
            await stream.head()
            broken = await asked(server.url, asking(prompt=BREAKS))
            await probe.send(request("/livez", method="GET"))
            assert (await probe.answer()).status == 503
            told, refused = await stream.rest(), await whole.answer()
        assert (broken.status, refused.status) == (500, 500)
        assert b'"error"' in told
        assert told.endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(server.exit_code, 20) == 1
        assert "the device thread has failed" in server.log()


def break_the_device_thread_and_tell_nobody() -> None:
    from nvium_core.engine.token_stream import TokenStream  # noqa: PLC0415

    def failing(stream: TokenStream, message: str, reason: FailureReason) -> list[Event]:
        raise MemoryError

    TokenStream.failures = failing  # type: ignore[method-assign]
    break_the_device_thread()


@pytest.mark.slow
@pytest.mark.parametrize("has_process", [False, True])
async def test_where_nobody_can_be_told_that_the_engine_has_ended_the_process_ends_at_once(
    model_folder: Path, tmp_path: Path, has_process: bool
) -> None:
    prepare = break_the_device_thread_and_tell_nobody
    with forked_server(model_folder, tmp_path / "log", prepare=prepare, engine_process=int(has_process)) as server:
        async with connected(server.url) as stream, connected(server.url) as whole:
            await stream.send(asking(max_tokens=3_000, stream=True))
            await stream.head()
            await whole.send(asking(prompt=BREAKS))
            if has_process:
                os.kill(engine_of(server), signal.SIGKILL)
            assert await asyncio.to_thread(server.exit_code, 20) == 1
        assert "stopping at once" in server.log()
        assert "stopping with requests still running" not in server.log()


def no_memory_to_deliver(turn: int) -> None:
    from nvium_core.engine.token_stream import Delivery, TokenStream  # noqa: PLC0415

    deliver, turns = TokenStream.deliver, count(1)

    def failing(stream: TokenStream, delivery: Delivery) -> None:
        if next(turns) == turn:
            raise MemoryError
        deliver(stream, delivery)

    TokenStream.deliver = failing  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("turn", [10, 30])
async def test_an_answer_of_which_a_token_could_not_be_delivered_fails_and_ends_the_process(
    model_folder: Path, tmp_path: Path, turn: int
) -> None:
    with forked_server(model_folder, tmp_path / "log", prepare=partial(no_memory_to_deliver, turn)) as server:
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=30))
            assert (await connection.answer()).status == 500
        assert await asyncio.to_thread(server.exit_code, 20) == 1


@pytest.mark.slow
def test_a_server_that_was_stopped_and_continued_is_live_at_once(model_folder: Path, tmp_path: Path) -> None:
    with forked_server(model_folder, tmp_path / "log", stall_seconds=1) as server:
        for _ in range(2):
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            server.process.send_signal(signal.SIGCONT)
            assert [server.http.get("/livez").status_code for _ in range(20)] == [200] * 20


@pytest.mark.slow
async def test_whole_requests_that_outlast_a_drain_are_to_be_tried_again(model_folder: Path, tmp_path: Path) -> None:
    with forked_server(model_folder, tmp_path / "log", drain_seconds=0.2) as server:
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=4_000))
            await asyncio.to_thread(
                wait_until, lambda: "nvium_requests_running 1.0" in server.http.get("/metrics").text
            )
            server.process.send_signal(signal.SIGTERM)
            answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert int(answer.headers["retry-after"]) > 0
        assert server.exit_code(seconds=20) == 0
