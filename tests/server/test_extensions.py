"""Fields of other servers are honoured or refused by name."""

import pytest

from nvium_core import ServerOptions
from server.errors import InvalidField
from server.schemas.body import Ignored, Unsupported
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.schemas.unsupported import UNSUPPORTED_FIELDS
from tests.byte_model import NAME, token_ids
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import Json, error_of


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
        ({"structured_outputs": {"grammar": 'root ::= "p" | "q"'}}, {"p", "q"}),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"guided_decoding_backend": "x", "structured_outputs": {"choice": ["yes"]}}, {"yes"}),
    ],
)
def test_an_answer_has_the_structure_that_was_asked_for(server, fields, texts):
    for seed in range(3):
        assert server.complete(seed=seed, **fields).json()["choices"][0]["text"] in texts


def test_every_choice_echoes_the_scores_of_its_prompt(server):
    asked: Json = {"n": 3, "best_of": 3, "echo": True, "logprobs": 0, "max_tokens": 2, "seed": 1}
    choices = server.complete(prompt=["abc", "de"], **asked).json()["choices"]
    for number, choice in enumerate(choices):
        logprobs, first = choice["logprobs"], choices[number - number % 3]["logprobs"]
        size = 3 if number < 3 else 2
        num_tokens = size + len(choice["nvium"]["token_ids"])
        assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == num_tokens
        assert logprobs["token_logprobs"][:size] == first["token_logprobs"][:size]


def test_prefixes_are_shared_only_with_the_same_salt(server):
    def num_cached(**salt: str) -> int:
        asked: Json = {"prompt": "a prompt that fills a page of the cache", "max_tokens": 9, "ignore_eos": True}
        usage = server.complete(**asked, logprobs=0, **salt).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert num_cached(cache_salt="mine") == 0
    assert num_cached(cache_salt="mine") > 0
    assert num_cached(cache_salt="other") == num_cached() == 0
    assert num_cached() > 0


def test_the_last_message_is_continued(server):
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}
    asked: Json = {"max_tokens": 1, "return_token_ids": True, "continue_final_message": True}
    messages = [user, answer]
    body = server.chat(messages=messages, add_generation_prompt=False, **asked).json()
    assert body["prompt_token_ids"] == token_ids("User:\na\n\nAssistant:\nWell, ")
    refused = error_of(server.chat(messages=[*messages, user], **asked))
    assert refused["param"] == "continue_final_message"
    refused = error_of(server.chat(messages=messages, add_generation_prompt=True, **asked))
    assert refused["param"] == "continue_final_message"


LIMITS = ServerOptions(max_n=9, max_prompts=9, max_new_tokens=99)
BODIES: list[tuple[type[GenerationRequest], Json]] = [
    (CompletionRequest, {"model": NAME, "prompt": "a"}),
    (ChatRequest, {"model": NAME, "messages": [{"role": "user", "content": "a"}]}),
]


def checked(request: GenerationRequest | ResponseRequest) -> None:
    if isinstance(request, ResponseRequest):
        request.as_chat([])
    else:
        request.check(LIMITS)


@pytest.mark.parametrize(("body", "start"), [*BODIES, (ResponseRequest, {"model": NAME, "input": "a"})])
def test_an_unsupported_field_is_accepted_only_with_its_neutral_values(body, start):
    marks = [(name, mark) for name, field in body.model_fields.items() for mark in field.metadata]
    own = {name: mark for name, mark in marks if isinstance(mark, Unsupported)}
    foreign = {name: UNSUPPORTED_FIELDS[name] for name in UNSUPPORTED_FIELDS.keys() - body.model_fields.keys()}
    for name, mark in (own | foreign).items():
        for value in mark.values:
            asked = body.model_validate(start | {name: value})
            checked(asked)
            assert [*asked.unknown_fields()] == ([name] if name in foreign else [])
        if not isinstance(mark, Ignored):
            with pytest.raises(InvalidField) as refused:
                checked(body.model_validate(start | {name: "something"}))
            assert refused.value.param == name


def test_the_reasoning_of_a_message_has_two_names():
    message = {"role": "assistant", "content": "a", "reasoning": "b"}
    asked = ChatRequest.model_validate({"model": NAME, "messages": [message]})
    assert (asked.messages[0].reasoning_content, [*asked.unknown_fields()]) == ("b", [])


def test_values_that_turn_a_field_off_are_accepted(server):
    off = {"top_k": -1, "stop": ["a", "a", "b", "c"], "ignore_eos": True}
    assert server.chat(max_tokens=1, top_logprobs=0, **off).status_code == 200
    for response in (server.chat(max_tokens=-1, ignore_eos=True), server.complete(max_tokens=-1, ignore_eos=True)):
        assert response.json()["usage"]["total_tokens"] == 4096


def test_tokens_are_counted_for_each_key(byte_model):
    with live_server(byte_model, api_keys="alice:sk-a", metrics_open=True) as server:
        server.http.headers["authorization"] = "Bearer sk-a"
        server.complete(prompt="abc", max_tokens=5, ignore_eos=True)
        wait_until(lambda: 'key="alice"' in server.http.get("/metrics").text)
        counted = [server.gauge(f'nvium_key_tokens_total{{key="alice",kind="{k}"}}') for k in ("prompt", "generated")]
    assert counted == [3, 5]


def test_a_threshold_chooses_the_exit_in_every_endpoint(server):
    last = server.http.get("/v1/models").json()["data"][0]["nvium"]["exit_layers"]
    for threshold, exit_ in ((1e-9, 1), (1, len(last))):
        asked: Json = {"nvium": {"sampling": "threshold", "threshold": threshold}, "ignore_eos": True, "seed": 3}
        scored = server.complete(**asked, max_tokens=9, logprobs=0, temperature=0).json()["choices"][0]
        assert scored["nvium"]["exits"] == [exit_] * 9 and len(scored["logprobs"]["token_logprobs"]) == 9
        assert server.chat(**asked, max_tokens=9).json()["choices"][0]["nvium"]["exits"] == [exit_] * 9
