"""Log-probabilities over HTTP equal the engine's, and align with tokens and text."""

from typing import Any

import pytest

from nvium_core import Completion, Engine, LoadedModel, SamplingParams
from nvium_core.text.detokenizer import REPLACEMENT
from tests.byte_model import token_ids
from tests.server.live_server import LiveServer

Json = dict[str, Any]
PROMPT = "Oncé upon"


def engine_scores(model: LoadedModel, prompt: list[int], **asked: Any) -> Completion:
    params = SamplingParams(seed=1, logprobs=3, prompt_logprobs=True, **asked)
    [completion] = Engine(model.model).generate([prompt], params)
    return completion


def test_logprobs_equal_the_engines(server: LiveServer, byte_model: LoadedModel) -> None:
    expected = engine_scores(byte_model, token_ids(PROMPT), max_tokens=8, ignore_eos=True)
    [choice] = server.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, logprobs=3).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([score.logprob for score in expected.scores], abs=1e-9)
    for top, score in zip(logprobs["top_logprobs"], expected.scores, strict=True):
        assert 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(score.top[0][1])


def test_an_echoed_prompt_is_scored_with_null_first(server: LiveServer, byte_model: LoadedModel) -> None:
    expected = engine_scores(byte_model, token_ids(PROMPT), max_tokens=0)
    for prompt in (PROMPT, token_ids(PROMPT)):
        choice = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
        assert choice["text"] == PROMPT
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        scores = [score.logprob for score in expected.prompt_scores]
        assert logprobs["token_logprobs"][1:] == pytest.approx(scores, abs=1e-9)


def test_one_token_after_an_echoed_prompt_is_scored_with_it(server: LiveServer) -> None:
    asked = {"prompt": [token_ids(PROMPT), token_ids("a")], "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = server.complete(**asked, temperature=0).json()["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len(token_ids(PROMPT)) + 1
    assert second["logprobs"]["token_logprobs"][0] is None
    assert len(second["logprobs"]["tokens"]) == 2


def test_the_alternatives_contain_the_sampled_token_with_the_same_logprob(server: LiveServer) -> None:
    body = server.complete(max_tokens=40, echo=True, logprobs=2, ignore_eos=True).json()
    logprobs = body["choices"][0]["logprobs"]
    for token, logprob, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_zero_alternatives_return_only_the_token_itself(server: LiveServer) -> None:
    logprobs = server.complete(max_tokens=5, logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_offsets_locate_each_token_in_the_text(server: LiveServer) -> None:
    choice = server.complete(prompt=PROMPT, max_tokens=60, echo=True, logprobs=0, ignore_eos=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][: len(PROMPT)] == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset] in (token, REPLACEMENT)  # incomplete characters appear with their last byte


def test_tokens_of_incomplete_characters_are_named_by_their_bytes(server: LiveServer) -> None:
    logprobs = server.complete(prompt="é", max_tokens=0, echo=True, logprobs=20).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert len(logprobs["top_logprobs"][1]) >= 20


def test_temperature_and_biases_do_not_change_logprobs(server: LiveServer) -> None:
    asked = {"prompt": "Once", "max_tokens": 1, "logprobs": 20, "echo": True}
    plain = server.complete(**asked).json()["choices"][0]["logprobs"]
    biased = server.complete(**asked, temperature=0.3, logit_bias={"66": 90}).json()["choices"][0]["logprobs"]
    assert biased["token_logprobs"][:-1] == plain["token_logprobs"][:-1]
    assert biased["tokens"][-1] == "A"
    assert biased["top_logprobs"][-1] | plain["top_logprobs"][-1] == plain["top_logprobs"][-1] | {
        "A": biased["token_logprobs"][-1]
    }
