"""Fields of other servers are honoured or refused by name."""

from typing import Any

import pytest

from nvium_core import LoadedModel
from server.errors import InvalidField
from server.schemas.aliases import ALIASES
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.foreign import FOREIGN
from server.schemas.generation import GenerationRequest, RequestLimits
from tests.byte_model import NAME, load_byte_model, token_ids
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.test_refusals import error_of

Json = dict[str, Any]


def text(server: LiveServer, **body: Any) -> str:
    response = server.complete(**body)
    assert response.status_code == 200, response.text
    answer: str = response.json()["choices"][0]["text"]
    return answer


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "ab|cd"}, {"ab", "cd"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_json": '{"const": 7}'}, {"7"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "p" | "q"'}, {"p", "q"}),
        ({"structured_outputs": {"grammar": 'root ::= "r"'}}, {"r"}),
        ({"regex": "ab|cd"}, {"ab", "cd"}),
        ({"ebnf": 'root ::= "p" | "q"'}, {"p", "q"}),
        ({"json_schema": {"enum": [1, 2]}}, {"1", "2"}),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"guided_regex": "ab|cd", "structured_outputs": {"regex": "ab|cd"}}, {"ab", "cd"}),
        ({"guided_decoding_backend": "x", "guided_choice": ["yes"]}, {"yes"}),
    ],
)
def test_aliases_of_structured_outputs_work(server: LiveServer, fields: Json, texts: set[str]) -> None:
    assert {text(server, seed=seed, **fields) for seed in range(3)} <= texts


def test_only_allowed_tokens_are_sampled(server: LiveServer) -> None:
    allowed = token_ids("abc")
    answer = text(server, allowed_token_ids=allowed, max_tokens=30)
    assert len(answer) == 30 and set(answer) <= set("abc")
    assert set(text(server, allowed_token_ids=allowed, guided_regex="[b-d]{9}")) <= set("bc")
    for wrong in ([257], []):
        assert error_of(server.complete(allowed_token_ids=wrong))["param"] == "allowed_token_ids"


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_tokens_that_contradict_the_form_are_a_400(server: LiveServer, stream: bool) -> None:
    asked = {"response_format": {"type": "json_object"}, "stream": stream, "max_tokens": 9}
    refused = server.complete(allowed_token_ids=token_ids("x"), **asked)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "no_token_allowed"
    later = server.complete(allowed_token_ids=token_ids("{"), **asked)
    assert '"no_token_allowed"' in later.text


def test_bad_words_are_not_generated(server: LiveServer) -> None:
    only = {"allowed_token_ids": token_ids("abc"), "max_tokens": 60}
    assert "aa" in text(server, **only)
    answer = text(server, **only, bad_words=["aa", "bab"])
    assert "aa" not in answer and "bab" not in answer


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("nvium.metdata", {"nvium": {"metdata": False}}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("use_beam_search", {"use_beam_search": True}),
        ("response_format.pattern", {"response_format": {"type": "json_object", "pattern": "a"}}),
        ("response_format.schema", {"response_format": {"type": "text", "schema": {}}}),
        ("response_format.type", {"response_format": {"type": "structural_tag", "structures": []}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"regex": "a", "structural_tag": "x"}}),
        ("n_predict", {"n_predict": "many"}),
        ("stop_words", {"top_k": 5, "stop_words": 5}),
        ("n_predict", {"user": "x", "n_predict": "x"}),
        ("repeat_penalty", {"repeat_penalty": 0}),
        ("repeat_penalty", {"repeat_penalty": 1.3, "repetition_penalty": 1.2}),
        ("priority", {"priority": "high"}),
        ("cache_salt", {"cache_salt": ""}),
        ("guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}),
        ("bad_words", {"bad_words": ["a"], "guided_choice": ["a"]}),
        ("bad_words", {"bad_words": [""]}),
        ("grammar", {"grammar": "root ::= ((("}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("metadata", {"metadata": {"a": 1}}),
    ],
)
def test_invalid_and_unsupported_fields_are_refused_by_name(server: LiveServer, param: str, fields: Json) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"].split("[")[0].removesuffix(".a") == param


def test_metadata_is_echoed_and_effort_hints_are_reported_as_ignored(server: LiveServer) -> None:
    response = server.chat(max_tokens=1, metadata={"run": "7"}, reasoning_effort="low", verbosity="high")
    assert response.json()["metadata"] == {"run": "7"}
    assert response.headers["x-nvium-ignored-params"] == "reasoning_effort, verbosity"


def test_a_prompt_is_truncated_to_its_last_tokens(server: LiveServer) -> None:
    asked = {"max_tokens": 3, "return_token_ids": True}
    cut = server.complete(prompt="abcdef", truncate_prompt_tokens=2, **asked).json()["choices"][0]
    assert cut["prompt_token_ids"] == token_ids("ef")
    assert cut["token_ids"] == server.complete(prompt="ef", **asked).json()["choices"][0]["token_ids"]


def test_a_prompt_is_truncated_to_leave_room_for_the_answer(server: LiveServer) -> None:
    asked: Json = {"truncate_prompt_tokens": -1, "return_token_ids": True}
    choice = server.complete(prompt="abc" * 2000, max_tokens=2, **asked).json()["choices"][0]
    assert choice["prompt_token_ids"] == token_ids("abc" * 2000)[-(4096 - 2) :]
    messages = [{"role": "user", "content": "abc" * 2000}]
    assert len(server.chat(messages=messages, **asked).json()["prompt_token_ids"]) == 4095


@pytest.mark.parametrize("number", [0, 2])
def test_prompt_logprobs_have_vllms_format(server: LiveServer, number: int) -> None:
    asked: Json = {"max_tokens": 1, "seed": 1}
    echoed = server.complete(prompt="abc", echo=True, logprobs=number, **asked).json()["choices"][0]["logprobs"]
    for more in ({}, {"n": 2}, {"logprobs": 5}):
        body = server.complete(prompt="abc", prompt_logprobs=number, **asked, **more).json()
        for choice in body["choices"]:
            none, *entries = choice["prompt_logprobs"]
            assert none is None
            own = [entry[str(token_id)] for token_id, entry in zip(token_ids("bc"), entries, strict=True)]
            assert [value["logprob"] for value in own] == echoed["token_logprobs"][1:3]
            assert [value["decoded_token"] for value in own] == ["b", "c"]
            assert all(number <= len(entry) <= number + 1 for entry in entries)
            ranks = [sorted(value["rank"] for value in entry.values() if value["rank"]) for entry in entries]
            assert all(rank[:number] == [*range(1, number + 1)] for rank in ranks)
            assert (choice["logprobs"] is not None) == ("logprobs" in more)
            assert len((choice["logprobs"] or {"top_logprobs": [{}]})["top_logprobs"][0]) <= 6


def test_chat_returns_prompt_logprobs_at_the_top_level(server: LiveServer) -> None:
    body = server.chat(prompt_logprobs=1, max_tokens=1, return_token_ids=True).json()
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    assert body["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in server.chat(max_tokens=1).json()


def test_every_choice_echoes_the_scores_of_its_prompt(server: LiveServer) -> None:
    asked: Json = {"n": 3, "best_of": 3, "echo": True, "logprobs": 0, "max_tokens": 2, "seed": 1}
    choices = server.complete(prompt=["abc", "de"], **asked).json()["choices"]
    for number, choice in enumerate(choices):
        logprobs, first = choice["logprobs"], choices[number - number % 3]["logprobs"]
        size = 3 if number < 3 else 2
        num_tokens = size + len(choice["nvium"]["token_ids"])
        assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == num_tokens
        assert logprobs["token_logprobs"][:size] == first["token_logprobs"][:size]


def test_prefixes_are_shared_only_with_the_same_salt(server: LiveServer) -> None:
    def num_cached(**salt: str) -> int:
        asked: Json = {"prompt": "a prompt that fills a page of the cache", "max_tokens": 9, "ignore_eos": True}
        usage = server.complete(**asked, logprobs=0, **salt).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert num_cached(cache_salt="mine") == 0
    assert num_cached(cache_salt="mine") > 0
    assert num_cached(cache_salt="other") == num_cached() == 0
    assert num_cached() > 0


def test_stop_reason_is_the_stop_string_or_token(server: LiveServer) -> None:
    free = text(server, max_tokens=40, ignore_eos=True)
    stop = next(character for character in free[3:] if character.isascii())
    by_string = server.complete(max_tokens=40, ignore_eos=True, stop=stop).json()["choices"][0]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", stop)
    by_token = server.complete(guided_regex="[a-c]{20}", stop_token_ids=token_ids("b")).json()["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", token_ids("b")[0])
    assert server.complete(max_tokens=1).json()["choices"][0]["stop_reason"] is None


def test_special_tokens_appear_in_the_text_on_request(server: LiveServer) -> None:
    asked: Json = {"allowed_token_ids": [0], "ignore_eos": True, "max_tokens": 2}
    assert text(server, **asked) == ""
    assert text(server, **asked, skip_special_tokens=False) == "<|endoftext|>" * 2


@pytest.mark.parametrize("name", ["prefix", "partial", None])
def test_the_last_message_is_continued(server: LiveServer, name: str | None) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}
    asked: Json = {"max_tokens": 1, "return_token_ids": True}
    messages = [user, answer | {name: True} if name else answer]
    asked |= {} if name else {"continue_final_message": True, "add_generation_prompt": False}
    body = server.chat(messages=messages, **asked).json()
    assert body["prompt_token_ids"] == token_ids("User:\na\n\nAssistant:\nWell, ")
    refused = error_of(server.chat(messages=[*messages, user], **asked))
    assert refused["param"] == (f"messages[1].{name}" if name else "continue_final_message")
    refused = error_of(server.chat(messages=messages, **asked | {"add_generation_prompt": True}))
    assert refused["param"] == "continue_final_message"


def test_the_chat_template_receives_its_variables() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{{ messages[-1].content }}{% if thinks %}!{% endif %}"
    with live_server(model) as server:
        asked = {"max_tokens": 1, "return_token_ids": True, "chat_template_kwargs": {"thinks": True}}
        assert server.chat("a", **asked).json()["prompt_token_ids"] == token_ids("a!")
        messages = [{"role": "assistant", "content": "ab"}]
        continued = server.chat(messages=messages, continue_final_message=True, max_tokens=1, return_token_ids=True)
        assert continued.json()["prompt_token_ids"] == token_ids("ab")


LIMITS = RequestLimits(max_n=9, max_prompts=9, max_new_tokens=99)
BODIES: list[tuple[type[GenerationRequest], Json]] = [
    (CompletionRequest, {"model": NAME, "prompt": "a"}),
    (ChatRequest, {"model": NAME, "messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("body", "start"), BODIES)
def test_a_foreign_field_is_accepted_only_with_its_neutral_values(body: type[GenerationRequest], start: Json) -> None:
    for name in FOREIGN.keys() - body.model_fields.keys():
        for value in FOREIGN[name].values:
            asked = body.model_validate(start | {name: value})
            asked.check(LIMITS)
            assert asked.unknown_fields == [name]
        with pytest.raises(InvalidField) as refused:
            body.model_validate(start | {name: "something"}).check(LIMITS)
        assert refused.value.param == name


VALUES: Json = {"repetition_penalty": 1.5, "stop": ["b"], "include_stop_str_in_output": True, "echo": True}


@pytest.mark.parametrize(("body", "start"), BODIES)
def test_an_alias_sets_the_field(body: type[GenerationRequest], start: Json) -> None:
    for name, own in ALIASES.items():
        value = VALUES.get(own, 3)
        if own in body.model_fields and name not in body.model_fields:
            for asked in ({name: value}, {name: value, own: value}):
                request = body.model_validate(start | asked)
                assert (getattr(request, own), request.unknown_fields) == (value, [])


def test_an_alias_has_the_effect_of_the_field(server: LiveServer) -> None:
    plain, field, alias = (
        text(server, max_tokens=30, ignore_eos=True, **penalty)
        for penalty in ({}, {"repetition_penalty": 1.9}, {"repeat_penalty": 1.9})
    )
    assert plain != field == alias


def test_values_that_turn_a_field_off_are_accepted(server: LiveServer) -> None:
    off = {"top_k": -1, "stop": ["a", "a", "b", "c", "d"], "ignore_eos": True}
    assert server.chat(max_tokens=1, top_logprobs=0, **off).status_code == 200
    for response in (server.chat(max_tokens=-1, ignore_eos=True), server.complete(n_predict=-1, ignore_eos=True)):
        assert response.json()["usage"]["total_tokens"] == 4096


def test_tokens_are_counted_for_each_key(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys="alice:sk-a", metrics_open=True) as server:
        server.http.headers["authorization"] = "Bearer sk-a"
        server.complete(prompt="abc", max_tokens=5, ignore_eos=True)
        wait_until(lambda: 'key="alice"' in server.http.get("/metrics").text)
        counted = [server.gauge(f'nvium_key_tokens_total{{key="alice",kind="{k}"}}') for k in ("prompt", "generated")]
    assert counted == [3, 5]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/load_lora_adapter"])
def test_an_unknown_endpoint_refers_to_the_list_of_endpoints(server: LiveServer, path: str) -> None:
    refused = server.http.post(path, json={})
    assert (refused.status_code, "/openapi.json" in error_of(refused)["message"]) == (404, True)


def test_original_samples_from_the_last_exit(server: LiveServer) -> None:
    asked: Json = {"nvium": {"sampling": "original"}, "max_tokens": 30, "ignore_eos": True, "seed": 3}
    whole = server.complete(**asked).json()["choices"][0]
    again = server.complete(**asked, n=2).json()["choices"][0]
    assert whole["nvium"]["token_ids"] == again["nvium"]["token_ids"]
    assert set(whole["nvium"]["exit_probabilities"]) == {1.0}
    assert whole["text"] != server.complete(**asked | {"nvium": {}}).json()["choices"][0]["text"]
    greedy = [server.complete(**asked, temperature=0, logprobs=logprobs).json()["choices"][0] for logprobs in (None, 1)]
    assert greedy[0]["nvium"]["token_ids"] == greedy[1]["nvium"]["token_ids"]
    tops = greedy[1]["logprobs"]["top_logprobs"]
    assert greedy[1]["logprobs"]["token_logprobs"] == [max(top.values()) for top in tops]
