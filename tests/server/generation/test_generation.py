"""A request's choices: submission, failures, and the order of tokens and prompt scores."""

from collections.abc import Sequence

import pytest

from nvium_core import (
    Admitted,
    EngineError,
    EngineRequest,
    EngineWorker,
    PromptEvent,
    SamplingParams,
    Score,
    TokenEvent,
    TokenStream,
)
from server.generation.choice_text import ChoiceText, Prompt
from server.generation.generation import Choice, Generation, choices_of
from server.generation.service import Service
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from tests.byte_model import load_byte_model, token_ids
from tests.server.live_server import LiveServer

SCORES = (Score(-1.0), Score(-2.0))


def test_a_request_that_cannot_be_submitted_releases_its_admission(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: EngineWorker, requests: Sequence[EngineRequest]) -> TokenStream:
        raise EngineError("the engine has stopped")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", stopped)
        assert server.complete(prompt=["a", "b", "c"], max_tokens=3000).status_code == 500
    assert server.service.admission.num_present == 0
    assert server.complete(n=3, max_tokens=2).status_code == 200


@pytest.mark.parametrize("of_server", [(RequestRecord, "admitted"), (Service, "deadline"), (Choice, "__init__")])
def test_a_failure_after_submission_cancels_the_sequences(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, of_server: tuple[type, str]
) -> None:
    submit, streams = EngineWorker.submit, list[TokenStream]()

    def submitted(self: EngineWorker, requests: Sequence[EngineRequest], tenant: str = "") -> TokenStream:
        streams.append(submit(self, requests, tenant))
        return streams[-1]

    def failing(*args: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", submitted)
        patched.setattr(*of_server, failing)
        assert server.complete(n=2, max_tokens=3000, ignore_eos=True).status_code == 500
    [stream] = streams
    assert stream.is_over
    assert server.service.admission.num_present == 0


@pytest.mark.parametrize("is_together", [True, False])
async def test_every_choice_starts_with_its_prompts_scores_even_if_its_tokens_arrive_first(is_together: bool) -> None:
    record = RequestRecord(Metrics([1.0]), request_id="request", endpoint="completions")
    record.admitted(num_prompt_tokens=3)
    prompt, tokenizer = Prompt(token_ids("abc")), load_byte_model().tokenizer.backend_tokenizer
    texts = [ChoiceText(tokenizer, [], index, prompt, include_stop=False, echo=True) for index in range(2)]
    stream = TokenStream([("a", 0), ("a", 1)], cancel=lambda key: None, on_close=lambda stream: None)
    stream.admissions |= dict.fromkeys(stream.keys, Admitted(0.0, 0))
    choices = choices_of(texts, record, SamplingParams(n=2, prompt_logprobs=True, logprobs=0))
    generation = Generation(stream, choices, leave=lambda: None, deadline=None)
    token, scores = TokenEvent("a", 5, 1, 0.5, "length", 1, SCORES[0]), PromptEvent("a", SCORES, None, 0)
    for events in [[token, scores]] if is_together else [[token], [scores]]:
        stream.deliver(list(events))
        deltas = generation.take()
    assert [(delta.index, tuple(delta.prompt_scores), len(delta.tokens)) for delta in deltas] == [
        (0, SCORES, 0),
        (1, SCORES, 1),
    ]
