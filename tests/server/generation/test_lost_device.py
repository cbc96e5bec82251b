"""After a device failure the engine stops, the probes fail, and the process exits for its supervisor to restart."""

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

BODY = {"model": NAME, "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "seed": 1}
POISON = 4321
"""The seed of a request at which the device fails."""


class Lost:
    """Replaces a backend's `run` and always fails."""

    num_steps = 0

    def __call__(self, step: Step, max_rows: int) -> StepResult:
        self.num_steps += 1
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_in_flight_requests_fail_and_no_step_runs_again(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        lost = server.service.worker.engine.runner.backend.run = Lost()  # type: ignore[attr-defined]
        prompts = [f"Once{number}" for number in range(5)]
        response = server.http.post("/v1/completions", json=BODY | {"prompt": prompts})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert lost.num_steps == 1
        assert server.service.has_failed
        assert server.http.get("/livez").status_code == 503
        assert server.http.post("/v1/completions", json=BODY).status_code == 503
        assert lost.num_steps == 1


def fail_at_poison() -> None:
    run = Runner.run

    def run_or_fail(runner: Runner, step: Step) -> list[StepResult]:
        if POISON in [run.sequence.seed for run in step.runs]:
            runner.backend.run = Lost()  # type: ignore[method-assign]
        return run(runner, step)

    Runner.run = run_or_fail  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_server_exits_with_a_code_that_makes_a_supervisor_restart_it(model_folder: Path, tmp_path: Path) -> None:
    with forked_server(model_folder, tmp_path / "log", prepare=fail_at_poison) as server:
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        body = BODY | {"max_tokens": 4000, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            assert server.http.post("/v1/completions", json=BODY | {"seed": POISON}).status_code == 500
            *_, error, _, done, _ = lines
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
            assert done == "data: [DONE]"
        wait_until(lambda: server.process.poll() is not None)
        assert server.exit_code(seconds=20) == FAILURE
