"""Log-probabilities over HTTP are those of the engine, aligned with tokens and text."""

from typing import Any

import pytest

from nvium_core import Completion, Engine, LoadedModel, SamplingParams
from nvium_core.text.detokenizer import REPLACEMENT
from nvium_core.text.token_bytes import TokenBytes
from tests.byte_model import token_ids
from tests.server.live_server import LiveServer

Json = dict[str, Any]
PROMPT = "Oncé upon"


def engine_scores(model: LoadedModel, prompt: list[int], **asked: Any) -> Completion:
    params = SamplingParams(seed=1, logprobs=3, prompt_logprobs=True, **asked)
    [completion] = Engine(model.model).generate([prompt], params)
    return completion


def test_log_probabilities_are_those_of_the_engine(server: LiveServer, byte_model: LoadedModel) -> None:
    expected = engine_scores(byte_model, token_ids(PROMPT), max_tokens=8, ignore_eos=True)
    told = server.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, logprobs=3).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([score.logprob for score in expected.scores], abs=1e-9)
    for top, score in zip(told["top_logprobs"], expected.scores, strict=True):
        assert 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(score.top[0][1])


def test_an_echoed_prompt_is_scored_with_null_first(server: LiveServer, byte_model: LoadedModel) -> None:
    expected = engine_scores(byte_model, token_ids(PROMPT), max_tokens=0)
    for prompt in (PROMPT, token_ids(PROMPT)):
        choice = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
        assert choice["text"] == PROMPT
        assert choice["finish_reason"] == "length"
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        scores = [score.logprob for score in expected.prompt_scores]
        assert told["token_logprobs"][1:] == pytest.approx(scores, abs=1e-9)


def test_one_token_after_an_echoed_prompt_is_scored_with_it(server: LiveServer) -> None:
    asked = {"prompt": [token_ids(PROMPT), token_ids("a")], "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = server.complete(**asked, temperature=0).json()["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len(token_ids(PROMPT)) + 1
    assert second["logprobs"]["token_logprobs"][0] is None
    assert len(second["logprobs"]["tokens"]) == 2


def test_the_chosen_tokens_log_probability_is_the_same_float_among_the_alternatives(server: LiveServer) -> None:
    body = server.complete(max_tokens=40, echo=True, logprobs=2, ignore_eos=True).json()
    told = body["choices"][0]["logprobs"]
    for token, logprob, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]:
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_zero_alternatives_leave_the_token_itself(server: LiveServer) -> None:
    told = server.complete(max_tokens=5, logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in told["top_logprobs"]] == [[token] for token in told["tokens"]]


def test_offsets_say_where_each_token_stands_in_the_text(server: LiveServer) -> None:
    choice = server.complete(prompt=PROMPT, max_tokens=60, echo=True, logprobs=0, ignore_eos=True).json()["choices"][0]
    told = choice["logprobs"]
    assert told["text_offset"][: len(PROMPT)] == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset] in (token, REPLACEMENT)  # bytes of no character come with the next one


def test_parts_of_characters_have_names_of_their_own(server: LiveServer) -> None:
    told = server.complete(prompt="é", max_tokens=0, echo=True, logprobs=20).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert len(told["top_logprobs"][1]) >= 20


def test_temperature_and_biases_do_not_change_what_is_told(server: LiveServer) -> None:
    asked = {"prompt": "Once", "max_tokens": 1, "logprobs": 20, "echo": True}
    plain = server.complete(**asked).json()["choices"][0]["logprobs"]
    bent = server.complete(**asked, temperature=0.3, logit_bias={"66": 90}).json()["choices"][0]["logprobs"]
    assert bent["token_logprobs"][:-1] == plain["token_logprobs"][:-1]
    assert bent["tokens"][-1] == "A"
    assert bent["top_logprobs"][-1] | plain["top_logprobs"][-1] == plain["top_logprobs"][-1] | {
        "A": bent["token_logprobs"][-1]
    }


def test_the_bytes_of_all_tokens_are_those_they_stand_for(server: LiveServer) -> None:
    vocabulary: TokenBytes = server.service.vocabulary
    assert [vocabulary[token] for token in token_ids("aé ")] == [b"a", b"\xc3", b"\xa9", b" "]
