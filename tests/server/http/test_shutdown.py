import asyncio
import json
import signal
from pathlib import Path
from random import Random

import pytest

from tests.server.generating import PATHS, asking
from tests.server.live_server import wait_until
from tests.server.raw_client import Answer, connected
from tests.server.server_process import ServerProcess, server_process

NUM_CLIENTS = 40

LONG = 2_000
"""Tokens whose generation takes much longer than the 0.1 s within which the server handles a signal."""


def some_request(random: Random) -> bytes:
    max_tokens, n, stream = random.randrange(1, 80), random.randrange(1, 3), random.random() < 0.5
    return asking(random.choice(PATHS), max_tokens=max_tokens, n=n, stream=stream, seed=None)


async def ask_until_refused(server: ServerProcess, random: Random) -> list[Answer]:
    """Send one request after another until the server refuses one or stops. Return the responses."""
    answers: list[Answer] = []
    while not answers or answers[-1].status == 200:
        try:
            async with connected(server.url) as connection:
                await connection.send(some_request(random))
                if not await connection.has_answer():
                    return answers
                answers.append(await connection.answer())
        except ConnectionRefusedError:
            return answers
    return answers


@pytest.mark.slow
async def test_sigterm_under_load_loses_no_accepted_request(model_folder: Path, tmp_path: Path) -> None:
    with server_process(model_folder, tmp_path) as server:
        async with connected(server.url) as idle, connected(server.url) as long:
            clients = [asyncio.create_task(ask_until_refused(server, Random(number))) for number in range(NUM_CLIENTS)]
            await asyncio.sleep(1)
            await long.send(asking(max_tokens=LONG, stream=True))
            await long.has_answer()
            server.terminate()
            answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
            answers.append(await long.answer())
            assert server.exit_code(seconds=10) == 0
            assert await idle.reader.read() == b""
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    for answer in served:
        assert set(answer.finish_reasons()) == {"length"}
        assert len(answer.finish_reasons()) == len(answer.spoken())
    for answer in refused:
        assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
        assert int(answer.headers["retry-after"]) > 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    outcomes = [line["outcome"] for line in lines if line["event"] == "request"]
    assert sorted(outcomes) == ["completed"] * len(served) + ["rejected"] * len(refused)
    assert [line["event"] for line in lines if line["event"] in ("draining", "stopped")] == ["draining", "stopped"]
    assert next(line["choices"] for line in lines if line["event"] == "draining") > 0
    assert "Once" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("is_reused", [False, True])
async def test_a_request_in_flight_at_sigterm_gets_a_503(model_folder: Path, tmp_path: Path, is_reused: bool) -> None:
    with server_process(model_folder, tmp_path) as server:
        async with connected(server.url) as opened, connected(server.url):
            if is_reused:
                assert (await opened.ask(asking(max_tokens=2))).status == 200
            server.terminate()
            await asyncio.sleep(1.3)  # uvicorn resets its default headers every second
            answer = await opened.ask(asking(max_tokens=2))
            assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
            assert answer.headers["connection"] == "close"
            assert server.exit_code(seconds=5) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_fails_open_requests_and_stops(
    model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with server_process(model_folder, tmp_path) as server:
        async with connected(server.url) as stream, connected(server.url) as whole, connected(server.url) as arriving:
            await stream.send(asking(max_tokens=4000, n=8, stream=True))
            await whole.send(asking(max_tokens=4000))
            await arriving.send(asking(max_tokens=1)[:-5])
            await stream.head()
            wait_until(lambda: "nvium_requests_running 9.0" in server.http.get("/metrics").text)
            server.process.send_signal(number)
            wait_until(lambda: not server.is_ready)
            server.process.send_signal(number)
            assert (await stream.rest()).endswith(b"data: [DONE]\n\n")
            for each in (whole, arriving):
                answer = await each.answer()
                assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_stopped")
            assert server.exit_code(seconds=20) == 0
        assert "Traceback" not in server.log()
