"""A request may take so long and no longer, whatever it waits for."""

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
    """Takes its time over every Step, so that no machine finishes a long request early."""

    def run(self, step: Step) -> StepResult:
        time.sleep(0.03)
        return super().run(step)


@pytest.fixture(scope="module")
def hurried(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model, max_sequences=1, request_seconds=SECONDS) as live:
        live.service.engine.runner.__class__ = SlowRunner
        yield live


def test_what_runs_ends_with_length_and_what_it_has(hurried: LiveServer) -> None:
    started = time.monotonic()
    choice = hurried.complete(**LONG).json()["choices"][0]
    assert time.monotonic() - started >= SECONDS
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["nvium"]["token_ids"]) < LONG["max_tokens"]
    wait_until(lambda: not hurried.service.engine.has_work)


def test_a_stream_ends_in_order(hurried: LiveServer) -> None:
    chunks = list(
        hurried.client(strict=False).completions.create(model="default", prompt="Once", stream=True, extra_body=LONG)
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(chunks[-1].nvium["exit_counts"]) == sum(len(chunk.choices[0].nvium["token_ids"]) for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_what_never_began_is_refused(hurried: LiveServer, stream: bool) -> None:
    with hurried.http.stream(
        "POST", "/v1/completions", json={"model": "default", "prompt": "a", "stream": True} | LONG
    ):
        wait_until(lambda: hurried.service.worker.state.num_running == 1)
        patient = SECONDS
        hurried.service.settings = hurried.service.settings.model_copy(update={"request_seconds": 0.05})
        response = hurried.complete(stream=stream)
        hurried.service.settings = hurried.service.settings.model_copy(update={"request_seconds": patient})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: hurried.service.admission.num_present == 0)


def test_choices_that_ended_in_time_keep_their_end(hurried: LiveServer) -> None:
    body = hurried.complete(prompt=["a", "b"], **LONG).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert body["choices"][1]["text"] == ""


def test_the_best_of_several_can_be_told_though_some_never_began(byte_model: LoadedModel) -> None:
    with live_server(byte_model, max_sequences=1, request_seconds=2) as server:
        server.service.engine.runner.__class__ = SlowRunner
        answer = server.complete(best_of=3, **LONG)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["nvium"]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_half_a_prompt_are_never_told_as_all(hurried: LiveServer, stream: bool) -> None:
    asked = {"prompt": ["a" * 3000] * 30, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    response = hurried.complete(**asked)
    assert "deadline_exceeded" in response.text
    assert stream or response.status_code == 503
