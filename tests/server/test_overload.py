"""A full queue, and Steps and threads that hang."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult
from server.generation import service
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, asked, asking, connected, post

NUM_RUNNING = 4
NUM_REQUESTS = 1_000


def running(seed: int) -> bytes:
    return asking(seed=seed, max_tokens=400, stream=True)


@pytest.mark.parametrize("path", PATHS)
async def test_a_flood_is_refused_while_running_streams_continue(byte_model, path):
    with live_server(byte_model, max_sequences=NUM_RUNNING, max_queue=8) as server:
        alone = [(await asked(server.url, running(seed))).spoken() for seed in range(NUM_RUNNING)]
        with hanging_steps():
            streams = [asyncio.create_task(asked(server.url, running(seed))) for seed in range(NUM_RUNNING)]
            await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == NUM_RUNNING)
        flood = (asked(server.url, asking(path, max_tokens=400)) for _ in range(NUM_REQUESTS))
        answers = await asyncio.gather(*flood)
        assert [stream.spoken() for stream in await asyncio.gather(*streams)] == alone
        shed = [answer for answer in answers if answer.status != 200]
        assert len(shed) > NUM_REQUESTS / 2
        for answer in shed:
            assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_full")
            assert int(answer.headers["retry-after"]) > 0
        assert server.gauge('nvium_rejected_total{reason="queue_full"}') == len(shed)
        wait_until(lambda: server.service.admission.num_present == 0)


@contextmanager
def hanging_steps() -> Iterator[None]:
    """Let Steps hang while the context is open."""
    run, may_continue = Runner.run, threading.Event()

    def hang(runner: Runner, step: Step) -> StepResult:
        may_continue.wait()
        return run(runner, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", hang)
        try:
            yield
        finally:
            may_continue.set()


async def test_livez_fails_while_a_step_hangs(byte_model):
    with live_server(byte_model, stall_seconds=1) as server:
        alone = (await asked(server.url, running(1))).spoken()
        async with connected(server.url) as connection:
            with hanging_steps():
                await connection.send(running(1))
                wait_until(lambda: server.http.get("/livez").status_code == 503)
                assert server.http.get("/livez").json()["error"]["code"] == "not_live"
                assert server.http.get("/health").status_code == 503
                assert server.http.get("/readyz").status_code == 200
                assert server.http.get("/v1/models").status_code == 200
                assert server.http.get("/metrics").status_code == 200
                assert server.complete(max_tokens=0).status_code == 400
            wait_until(lambda: server.http.get("/livez").status_code == 200)
            assert (await connection.answer()).spoken() == alone
        assert server.http.get("/health").status_code == 200
        await asyncio.sleep(1.5)
        wait_until(lambda: server.http.get("/livez").status_code == 200)  # an idle server is live
        assert server.complete(max_tokens=1).status_code == 200


async def test_a_disconnect_during_a_hanging_step_frees_the_sequence_afterwards(byte_model):
    with live_server(byte_model) as server:
        with hanging_steps():
            for _ in range(20):
                async with connected(server.url) as connection:
                    await connection.send(running(1))
                    wait_until(lambda: server.service.admission.num_present == 1)
                wait_until(lambda: server.service.admission.num_present == 0)
        wait_until(lambda: not server.service.engine.has_work)
        server.service.engine.check_idle()


NEVER_ENDS = """
import threading
from server.thread_pool import DaemonThreadPool
begun = threading.Event()
DaemonThreadPool(1, "test").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


def test_a_stuck_task_fails_the_liveness_probe_until_it_ends(byte_model, monkeypatch):
    monkeypatch.setattr(service, "TASK_SECONDS", 2)
    with live_server(byte_model) as server:
        release = threading.Event()
        server.service.text_threads.submit(release.wait)
        wait_until(lambda: server.http.get("/livez").status_code == 503)
        assert server.http.get("/livez").json()["error"]["code"] == "not_live"
        release.set()
        wait_until(lambda: server.http.get("/livez").status_code == 200)


async def test_a_client_that_hangs_up_is_not_tokenized_for(byte_model, monkeypatch):
    with live_server(byte_model) as server:
        encoded, release, encode = list[str](), threading.Event(), server.service.encode
        monkeypatch.setattr(server.service, "encode", lambda text, **how: encoded.append(text) or encode(text, **how))
        server.service.tokenizing_thread.submit(release.wait)
        async with connected(server.url) as leaving:
            await leaving.send(post("/tokenize", {"prompt": "a"}))
            await asyncio.sleep(0.1)
        gone = 'nvium_responses_total{endpoint="tokenize",status="499"}'
        await asyncio.to_thread(wait_until, lambda: server.gauge(gone) == 1)
        release.set()
        assert (await asked(server.url, post("/tokenize", {"prompt": "b"}))).status == 200
        assert encoded == ["b"]


def test_a_stuck_task_does_not_delay_the_exit():
    assert subprocess.run([sys.executable, "-c", NEVER_ENDS], timeout=60, check=True).returncode == 0
