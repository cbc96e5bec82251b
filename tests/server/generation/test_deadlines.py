"""A request past its deadline ends with `length`, or fails if it has not started."""

import time
from collections.abc import Iterator

import pytest

from nvium_core import LoadedModel
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult
from tests.server.live_server import LiveServer, live_server, wait_until

LONG = {"max_tokens": 3000, "ignore_eos": True}
SECONDS = 1.5


class SlowRunner(Runner):
    """Delays every Step, so no machine finishes a long request before its deadline."""

    def run(self, step: Step) -> StepResult:
        time.sleep(0.03)
        return super().run(step)


@pytest.fixture(scope="module")
def slow_server(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model, max_sequences=1, request_seconds=SECONDS) as live:
        live.service.engine.runner.__class__ = SlowRunner
        yield live


def test_a_running_request_ends_with_length(slow_server: LiveServer) -> None:
    started = time.monotonic()
    choice = slow_server.complete(**LONG).json()["choices"][0]
    assert time.monotonic() - started >= SECONDS
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["nvium"]["token_ids"]) < LONG["max_tokens"]
    wait_until(lambda: not slow_server.service.engine.has_work)


def test_a_stream_ends_with_length(slow_server: LiveServer) -> None:
    chunks = list(
        slow_server.client(strict=False).completions.create(
            model="default", prompt="Once", stream=True, extra_body=LONG
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(chunks[-1].nvium["exit_counts"]) == sum(len(chunk.choices[0].nvium["token_ids"]) for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_not_started_is_refused(slow_server: LiveServer, stream: bool) -> None:
    with slow_server.http.stream(
        "POST", "/v1/completions", json={"model": "default", "prompt": "a", "stream": True} | LONG
    ):
        wait_until(lambda: slow_server.service.worker.state.num_running == 1)
        patient = SECONDS
        slow_server.service.settings = slow_server.service.settings.model_copy(update={"request_seconds": 0.05})
        response = slow_server.complete(stream=stream)
        slow_server.service.settings = slow_server.service.settings.model_copy(update={"request_seconds": patient})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: slow_server.service.admission.num_present == 0)


def test_a_prompt_that_has_not_started_ends_with_length(slow_server: LiveServer) -> None:
    body = slow_server.complete(prompt=["a", "b"], **LONG).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert body["choices"][1]["text"] == ""


def test_best_of_ignores_choices_that_have_not_started(byte_model: LoadedModel) -> None:
    with live_server(byte_model, max_sequences=1, request_seconds=2) as server:
        server.service.engine.runner.__class__ = SlowRunner
        response = server.complete(best_of=3, **LONG)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["nvium"]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_partial_prompt_scores_are_an_error(slow_server: LiveServer, stream: bool) -> None:
    prompts = ["a" * 3000] * 30
    response = slow_server.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert "deadline_exceeded" in response.text
    assert stream or response.status_code == 503
