"""The app under another ASGI server, granian, with the guarantees that `docs/deploying.md` promises there."""

import pytest

from tests.server.live_server import wait_until
from tests.server.raw_client import asked, asking, connected, error_of, post
from tests.server.server_process import server_process

CODE = """
import os, granian
granian.Granian("server.app:create_app", port=int(os.environ["NVIUM_PORT"]), interface="asgi", factory=True).serve()
"""


@pytest.mark.slow
async def test_streams_disconnects_limits_and_slow_bodies_are_the_same_under_granian(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, CODE, max_body_bytes=9_999, arrival_seconds=1) as server:
        whole, streamed = [(await asked(server.url, asking(max_tokens=30, stream=stream))) for stream in (False, True)]
        assert whole.spoken() == streamed.spoken() != {}
        refused = await asked(server.url, post("/v1/completions", {"prompt": "a" * 9_999}))
        assert error_of(refused)["code"] == "body_too_large"
        async with connected(server.url) as slow:
            await slow.send(asking()[:-5])
            assert error_of(await slow.answer())["code"] == "request_timeout"
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=4_000, stream=True))
            await connection.head()
        cancelled = 'nvium_requests_total{endpoint="completions",outcome="cancelled"} 1.0'
        wait_until(lambda: cancelled in server.http.get("/metrics").text)
        server.terminate()
        assert server.exit_code(seconds=20) == 0
