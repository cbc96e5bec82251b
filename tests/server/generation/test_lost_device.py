"""A device that has failed: no request is tried on it again, probes say so, and a supervisor starts another server."""

import json
from pathlib import Path

import httpx
import pytest
import torch

from nvium_core import LoadedModel
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult
from server.http.drain import FAILURE
from tests.byte_model import NAME
from tests.server.forked_server import forked_server
from tests.server.live_server import live_server, wait_until

SAYING = {"model": NAME, "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "seed": 1}
POISON = 4321
"""A seed; the device fails under it."""


class Lost:
    """In place of a backend's `run`. Counts the Steps that were tried."""

    num_tried = 0

    def __call__(self, step: Step, max_rows: int) -> StepResult:
        self.num_tried += 1
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_what_is_under_way_is_answered_with_an_error_and_nothing_is_tried_again(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        lost = server.service.worker.engine.runner.backend.run = Lost()  # type: ignore[attr-defined]
        asked = [f"Once{number}" for number in range(5)]
        answer = server.http.post("/v1/completions", json=SAYING | {"prompt": asked})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert lost.num_tried == 1
        assert server.service.has_failed
        assert server.http.get("/livez").status_code == 503
        assert server.http.post("/v1/completions", json=SAYING).status_code == 503
        assert lost.num_tried == 1


def lose_the_device_under_poison() -> None:
    run = Runner.run

    def run_or_fail(runner: Runner, step: Step) -> list[StepResult]:
        if POISON in [each.sequence.seed for each in step.runs]:
            runner.backend.run = Lost()  # type: ignore[method-assign]
        return run(runner, step)

    Runner.run = run_or_fail  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_server_ends_with_a_code_that_a_supervisor_restarts(model_folder: Path, tmp_path: Path) -> None:
    with forked_server(model_folder, tmp_path / "log", prepare=lose_the_device_under_poison) as server:
        assert server.http.post("/v1/completions", json=SAYING).status_code == 200
        body = SAYING | {"max_tokens": 4000, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=30) as beside,
            beside.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            assert server.http.post("/v1/completions", json=SAYING | {"seed": POISON}).status_code == 500
            *_, error, _, done, _ = lines
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
            assert done == "data: [DONE]"
        wait_until(lambda: server.process.poll() is not None)
        assert server.exit_code(seconds=20) == FAILURE
