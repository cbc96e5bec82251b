"""A server whose engine has a process of its own."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nvium_core import Engine, LoadedModel
from server.generation import service
from server.settings import Settings
from tests.byte_model import NAME
from tests.faults.divisions import engine_of
from tests.faults.kinds import num_dropped_lines
from tests.server.forked_server import forked_server
from tests.server.generation.test_structured_outputs import SCHEMA, response_format
from tests.server.live_server import live_server, wait_until
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
        server_process(model_folder, tmp_path, dtype="float64", engine_process=True, schedule="whole") as server,
        live_server(byte_model, schedule="whole") as other,
    ):
        for path, body in ASKED:
            asked = {"model": NAME, **body}
            answers = [each.http.post(path, json=asked) for each in (server, other)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[0].json()["choices"] == answers[1].json()["choices"]
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.exit_code(seconds=40) != 0


NUM_LINES = 1_000


def let_the_engine_log() -> None:
    service.built = built_with_log_lines


def built_with_log_lines(settings: Settings) -> Engine:
    """In the engine's process, where the module is as it was."""
    engine = service.built(settings)
    for _ in range(NUM_LINES):
        logging.getLogger("nvium_core").warning("a line")
    return engine


@pytest.mark.slow
def test_log_lines_that_the_engines_process_could_not_write_are_counted(model_folder: Path) -> None:
    with forked_server(model_folder, Path("/dev/full"), prepare=let_the_engine_log, engine_process=1) as server:
        wait_until(lambda: num_dropped_lines(server) >= NUM_LINES)
        assert num_dropped_lines(server) >= NUM_LINES
