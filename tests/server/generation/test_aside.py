"""Work beside the event loop that does not come back is not alive, and does not keep the process from its end."""

import asyncio
import subprocess
import sys
import threading

from nvium_core import LoadedModel
from tests.server.live_server import live_server, wait_until

NEVER_ENDS = """
import threading
from server.generation.aside import Aside
begun = threading.Event()
Aside(1, "aside").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


def test_work_that_does_not_come_back_makes_the_probe_red(byte_model: LoadedModel) -> None:
    with live_server(byte_model, stall_seconds=2) as server:
        release = threading.Event()
        server.service._aside.submit(release.wait)
        wait_until(lambda: server.http.get("/livez").status_code == 503)
        release.set()
        wait_until(lambda: server.service._aside.seconds < 2)
        assert server.http.get("/livez").status_code == 200


def test_a_suspended_process_is_excused(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        release = threading.Event()
        server.service._aside.submit(release.wait)
        wait_until(lambda: server.service._aside.seconds > 0.1)
        server.service._aside.excuse()
        assert server.service._aside.seconds < 0.1
        release.set()


async def test_what_it_does_and_raises_comes_back(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        assert await server.service.aside(int, "3") == 3
        results = await asyncio.gather(server.service.aside(int, "x"), return_exceptions=True)
    assert isinstance(results[0], ValueError)


def test_it_does_not_keep_the_process_from_its_end() -> None:
    assert subprocess.run([sys.executable, "-c", NEVER_ENDS], timeout=60, check=True).returncode == 0
