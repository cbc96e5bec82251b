"""While the model loads, the server is live but not ready. When it drains, it loses no accepted request."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from random import Random
from typing import Any

import httpx
import pytest

from nvium_core import LoadedModel
from nvium_core.text import chat_template
from nvium_core.text.renderer import Renderer
from server import app
from server.admission import Loading
from server.app import assemble, run
from server.settings import Settings
from tests.server.forked_server import forked_server
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, Answer, asked, asking, connected, post, request
from tests.server.server_process import ServerProcess, free_port, server_process

LOADS_FOR = 1.0


async def test_only_livez_succeeds_while_the_model_loads(byte_model):
    with live_server(byte_model, build=lambda _, settings: assemble(Loading(settings))) as server:
        assert (await asked(server.url, request("/livez", method="GET"))).json() == {"status": "ok"}
        for path in ("/readyz", "/health", "/v1/models", "/metrics", "/"):
            check_not_ready(await asked(server.url, request(path, method="GET")))
        check_not_ready(await asked(server.url, post("/v1/completions", {"prompt": "Once"})))


def check_not_ready(answer: Answer) -> None:
    assert (answer.status, answer.json()["error"]["code"]) == (503, "not_ready")
    assert int(answer.headers["retry-after"]) > 0


AS_PID_1 = 'trap "" TERM; exec "$0" -c "$1" serve "$2" --port "$3"'
"""Start with SIGTERM ignored, as the first process of a container does."""

LOADS_FOREVER = """
import threading
from nvium_core import cli
from server import app
app.load_model = lambda *given, **more: threading.Event().wait()
cli.main()
"""


@pytest.mark.slow
def test_sigterm_ends_a_server_while_it_loads(tmp_path):
    port = free_port()
    process = subprocess.Popen(["sh", "-c", AS_PID_1, sys.executable, LOADS_FOREVER, tmp_path, str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            server = ServerProcess(process, http, tmp_path)
            wait_until(lambda: server.status("/livez") == 200, seconds=60)
        server.terminate()
        assert server.exit_code(seconds=30) == 0
    finally:
        process.kill()
        process.wait()


def slow_to_load() -> None:
    """Delay the loading of the model in the server's process."""
    load_model = app.load_model

    def slowly(*given: Any, **more: Any) -> LoadedModel:
        threading.Event().wait(LOADS_FOR)
        return load_model(*given, **more)

    app.load_model = slowly


def test_a_server_that_loads_becomes_ready_on_the_same_address(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", prepare=slow_to_load, waits=False) as server:
        statuses = set[int]()

        def is_ready() -> bool:
            statuses.add(server.status("/readyz"))
            return 200 in statuses

        wait_until(is_ready, seconds=120)
        assert statuses - {0} == {200, 503}
        assert server.http.get("/livez").status_code == 200
        assert server.http.get("/v1/models").json()["data"]


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_process_for_chat_templates_stays_only_if_the_model_has_one(model_folder, tmp_path, monkeypatch, template):
    own = Renderer()
    for module in (app, chat_template):
        monkeypatch.setattr(module, "RENDERER", own)
    file = tmp_path / "template.jinja"
    file.write_text(template or "")
    app.load(Settings(model=str(model_folder), chat_template=file if template else None, device="cpu"))
    assert len(own._idle) == (1 if template else 0)


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path, capfd):
    with pytest.raises(ValueError, match="no such folder"):
        run(Settings(model=str(tmp_path / "none"), port=0))
    assert not {"stopped", "Traceback"} & set(re.findall(r"\w+", capfd.readouterr().err))


async def test_a_server_that_says_goodbye_takes_requests_although_it_is_not_ready(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", goodbye_seconds=1.5) as server:
        async with connected(server.url) as opened, connected(server.url) as used:
            assert (await used.ask(asking(max_tokens=2))).status == 200
            server.terminate()
            wait_until(lambda: not server.is_ready)
            accepted = await asked(server.url, asking(max_tokens=2))
            assert (accepted.status, accepted.headers["connection"]) == (200, "close")
            wait_until(lambda: "draining" in server.log())
            for idle, late in ((opened, request("/v1/models", method="GET")), (used, asking())):
                refused = await idle.ask(late)
                assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
                assert refused.headers["connection"] == "close"
        assert server.exit_code(seconds=10) == 0


async def test_a_second_signal_ends_the_goodbye(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", goodbye_seconds=60) as server:
        server.terminate()
        wait_until(lambda: "goodbye" in server.log())
        server.terminate()
        assert server.exit_code(seconds=10) == 0


NUM_CLIENTS = 40

LONG = 2_000
"""Tokens whose generation takes much longer than the 0.1 s within which the server handles a signal."""


async def ask_until_refused(server: ServerProcess, random: Random) -> list[Answer]:
    """Send one request after another until the server refuses one or stops. Return the responses."""
    answers: list[Answer] = []
    while not answers or answers[-1].status == 200:
        try:
            async with connected(server.url) as connection:
                size = {"max_tokens": random.randrange(1, 80), "n": random.randrange(1, 3)}
                stream = random.random() < 0.5
                await connection.send(asking(random.choice(PATHS), **size, stream=stream, seed=None))
                if not await connection.has_answer():
                    return answers
                answers.append(await connection.answer())
        except ConnectionRefusedError:
            return answers
    return answers


@pytest.mark.slow
async def test_sigterm_under_load_loses_no_accepted_request(model_folder, tmp_path):
    with server_process(model_folder, tmp_path) as server:
        async with connected(server.url) as idle, connected(server.url) as long:
            clients = [asyncio.create_task(ask_until_refused(server, Random(number))) for number in range(NUM_CLIENTS)]
            await asyncio.sleep(1)
            await long.send(asking(max_tokens=LONG, stream=True))
            await long.has_answer()
            server.terminate()
            answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
            assert server.http.get("/readyz").json()["error"]["code"] == "not_ready"
            assert server.http.get("/livez").status_code == 200
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
    outcomes = [line["outcome"] for line in lines if line.get("endpoint", "other") != "other"]
    assert sorted(outcomes) == ["completed"] * len(served) + ["rejected"] * len(refused)
    assert [line["event"] for line in lines if line["event"] in ("draining", "stopped")] == ["draining", "stopped"]
    assert next(line["choices"] for line in lines if line["event"] == "draining") > 0
    assert "Once" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, None])
async def test_a_second_signal_or_the_end_of_the_drain_fails_open_requests(model_folder, tmp_path, second):
    with server_process(model_folder, tmp_path, drain_seconds=30 if second else 0.5) as server:
        async with connected(server.url) as stream, connected(server.url) as whole, connected(server.url) as arriving:
            await stream.send(asking(max_tokens=4000, n=8, stream=True))
            await whole.send(asking(max_tokens=4000))
            await arriving.send(asking(max_tokens=1)[:-5])
            await stream.head()
            wait_until(lambda: "nvium_requests_running 9.0" in server.http.get("/metrics").text)
            server.process.send_signal(second or signal.SIGTERM)
            wait_until(lambda: not server.is_ready)
            if second:
                server.process.send_signal(second)
            assert (await stream.rest()).endswith(b"data: [DONE]\n\n")
            for each in (whole, arriving):
                answer = await each.answer()
                assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_stopped")
                assert int(answer.headers["retry-after"]) > 0
            assert server.exit_code(seconds=20) == 0
        assert "Traceback" not in server.log()
