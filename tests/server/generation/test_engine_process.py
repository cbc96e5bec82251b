"""A server whose engine has a process of its own."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.generation.test_structured_outputs import SCHEMA, response_format
from tests.server.live_server import live_server
from tests.server.server_process import server_process

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 20, "seed": 1, "n": 2, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Once"}],
            "max_tokens": 60,
            "seed": 1,
            "response_format": response_format(SCHEMA),
        },
    ),
]


@pytest.mark.slow
def test_it_answers_as_one_with_a_thread_does_and_stops_when_its_engine_dies(
    model_folder: Path, byte_model: LoadedModel, tmp_path: Path
) -> None:
    with (
        server_process(model_folder, tmp_path, dtype="float64", engine_process=True) as server,
        live_server(byte_model) as other,
    ):
        for path, body in ASKED:
            asked = {"model": NAME, **body}
            answers = [each.http.post(path, json=asked) for each in (server, other)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[0].json()["choices"] == answers[1].json()["choices"]
        [engine] = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert server.exit_code(seconds=40) != 0


def children(pid: int) -> list[int]:
    """The engines among a process's children, which have one more for resources that are shared."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
