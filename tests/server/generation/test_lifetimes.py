"""From submission to the end of requests: failures, closed connections, stopped engines, lost devices, deadlines."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nvium_core import (
    Admitted,
    EngineError,
    EngineWorker,
    LoadedModel,
    PromptEvent,
    SamplingParams,
    Score,
    TokenEvent,
    TokenStream,
)
from nvium_core.text.detokenizer import StopStrings
from server.generation.choice import Choice, Prompt
from server.generation.generation import Generation
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from tests.byte_model import load_byte_model, token_ids
from tests.server.live_server import LiveServer, live_server, slowed_down, wait_until
from tests.server.raw_client import asked, asking, connected, error_of, events_of

SCORES = (Score(-1.0), Score(-2.0))


def test_a_request_that_cannot_be_submitted_releases_its_admission(server, monkeypatch):
    def stopped(self: EngineWorker, *asked: Any) -> TokenStream:
        raise EngineError("the engine has stopped")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", stopped)
        assert server.complete(prompt=["a", "b", "c"], max_tokens=3000).status_code == 500
    assert server.service.admission.num_present == 0
    assert server.complete(n=3, max_tokens=2).status_code == 200


@pytest.mark.parametrize("of_server", [(RequestRecord, "admitted"), (Generation, "__init__"), (Choice, "__init__")])
def test_a_failure_after_submission_cancels_the_sequences(server, monkeypatch, of_server):
    submit, streams = EngineWorker.submit, list[TokenStream]()

    def submitted(self: EngineWorker, *asked: Any) -> TokenStream:
        streams.append(submit(self, *asked))
        return streams[-1]

    def failing(*args: object, **more: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", submitted)
        patched.setattr(*of_server, failing)
        assert server.complete(n=2, max_tokens=3000, ignore_eos=True).status_code == 500
    [stream] = streams
    assert stream.is_over
    assert server.service.admission.num_present == 0


@pytest.mark.parametrize("is_together", [True, False])
async def test_every_choice_starts_with_its_prompts_scores_even_if_its_tokens_arrive_first(is_together):
    record = RequestRecord(Metrics([1.0]), request_id="request")
    record.admitted(num_prompt_tokens=3)
    of_prompt = Prompt(token_ids("abc")), record, load_byte_model().tokenizer.backend_tokenizer, StopStrings([])
    leader = Choice(0, *of_prompt, echo=True, is_scored=True)
    choices = [leader, Choice(1, *of_prompt, leader, echo=True, is_scored=True)]
    stream = TokenStream([("a", 0), ("a", 1)], cancel=lambda key: None, on_close=lambda stream: None)
    stream.admissions |= dict.fromkeys(stream.keys, Admitted(0.0, 0))
    generation = Generation(stream, choices, SamplingParams(), leave=lambda: None, deadline=None)
    token, scores = TokenEvent("a", 5, 1, 0.5, "length", 1, SCORES[0]), PromptEvent("a", SCORES, None, 0)
    for events in [[token, scores]] if is_together else [[token], [scores]]:
        stream.deliver(list(events))
        deltas = generation.take()
    found = [(delta.index, tuple(delta.prompt_scores), len(delta.tokens)) for delta in deltas]
    assert found == [(0, SCORES, 0), (1, SCORES, 1)]


async def test_a_stopped_engine_fails_open_and_new_requests(byte_model):
    with live_server(byte_model) as server:
        async with connected(server.url) as stream, connected(server.url) as whole:
            await stream.send(asking(max_tokens=4000, stream=True))
            await whole.send(asking(max_tokens=4000))
            wait_until(lambda: server.service.worker.state.num_running == 2)
            await stream.head()
            server.service.worker.stop()
            *_, error, done, end = (await stream.rest()).split(b"\n\n")
            refused = [await whole.answer(), await asked(server.url, asking(max_tokens=1))]
        assert [server.http.get(path).status_code for path in ("/livez", "/readyz")] == [503, 503]
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert (done, end) == (b"data: [DONE]", b"")
    for answer in refused:
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert int(answer.headers["retry-after"]) > 0


LONG = {"max_tokens": 3000, "ignore_eos": True}
SECONDS = 1.5


@pytest.fixture(scope="module")
def slow_server(byte_model: LoadedModel) -> Iterator[LiveServer]:
    """With the schedule `sweep`, all tokens might still wait for their scores when the time is up."""
    with live_server(byte_model, max_sequences=1, request_seconds=SECONDS, schedule="whole") as live:
        yield slowed_down(live)


def test_a_running_request_ends_with_length(slow_server):
    started = time.monotonic()
    choice = slow_server.complete(**LONG).json()["choices"][0]
    assert time.monotonic() - started >= SECONDS
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["nvium"]["token_ids"]) < LONG["max_tokens"]
    wait_until(lambda: not slow_server.service.engine.has_work)
    chunks = events_of(slow_server.complete(stream=True, **LONG).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "length"
    assert sum(chunks[-1]["nvium"]["exit_counts"]) == sum(len(choice["nvium"]["token_ids"]) for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_not_started_is_refused(slow_server, monkeypatch, stream):
    service, running = slow_server.service, {"model": "default", "prompt": "a", "stream": True} | LONG
    with slow_server.http.stream("POST", "/v1/completions", json=running):
        wait_until(lambda: service.worker.state.num_running == 1)
        monkeypatch.setattr(service, "settings", service.settings.model_copy(update={"request_seconds": 0.05}))
        response = slow_server.complete(stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: service.admission.num_present == 0)


def test_a_request_without_a_token_is_refused(slow_server, monkeypatch):
    service = slow_server.service
    monkeypatch.setattr(service, "settings", service.settings.model_copy(update={"request_seconds": 0.3}))
    response = slow_server.complete(prompt="a" * 3900)  # takes at least 16 Steps
    assert (response.status_code, error_of(response)["code"]) == (503, "deadline_exceeded")


def test_choices_that_have_not_started_are_empty_and_ignored_by_best_of(slow_server):
    choices = slow_server.complete(prompt=["a", "b"], **LONG).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert choices[1]["text"] == ""
    [choice] = slow_server.complete(best_of=3, **LONG).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["nvium"]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_partial_prompt_scores_are_an_error(slow_server, stream):
    response = slow_server.complete(prompt=["a" * 3000] * 30, echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert "deadline_exceeded" in response.text
    assert stream or response.status_code == 503
