"""A thread pool whose stuck tasks fail the liveness probe and do not delay the exit of the process."""

import asyncio
import subprocess
import sys
import threading

from nvium_core import LoadedModel
from tests.server.live_server import live_server, wait_until

NEVER_ENDS = """
import threading
from server.generation.thread_pool import DaemonThreadPool
begun = threading.Event()
DaemonThreadPool(1, "test").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


def test_a_stuck_task_fails_the_liveness_probe(byte_model: LoadedModel) -> None:
    with live_server(byte_model, stall_seconds=2) as server:
        release = threading.Event()
        server.service.text_threads.submit(release.wait)
        wait_until(lambda: server.http.get("/livez").status_code == 503)
        release.set()
        wait_until(lambda: server.service.text_threads.busy_seconds < 2)
        assert server.http.get("/livez").status_code == 200


def test_restart_clock_restarts_the_clock_of_running_tasks(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        release = threading.Event()
        server.service.text_threads.submit(release.wait)
        wait_until(lambda: server.service.text_threads.busy_seconds > 0.1)
        server.service.text_threads.restart_clock()
        assert server.service.text_threads.busy_seconds < 0.1
        release.set()


async def test_results_and_exceptions_are_returned(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        assert await server.service.text_threads.run(int, "3") == 3
        results = await asyncio.gather(server.service.text_threads.run(int, "x"), return_exceptions=True)
    assert isinstance(results[0], ValueError)


def test_a_stuck_task_does_not_delay_the_exit() -> None:
    assert subprocess.run([sys.executable, "-c", NEVER_ENDS], timeout=60, check=True).returncode == 0
