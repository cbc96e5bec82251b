import json
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from nvium_core import Engine, LoadedModel, SamplingParams
from tests.byte_model import END_OF_TEXT, NAME, load_byte_model, token_ids
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.test_refusals import error_of

Json = dict[str, Any]

PROMPT = token_ids("User:\nHello\n\nAssistant:\n")


def streamed(server: LiveServer, **body: Any) -> list[Json]:
    response = server.chat(stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert (events.pop(), end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_strict_client_reads_a_stream_to_the_same_text(server: LiveServer) -> None:
    client = server.client()
    asked: Json = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "seed": 3, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    assert client.chat.completions.parse(**asked).choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize("n", [1, 2])
def test_the_clients_stream_helper_collects_the_exits_of_all_tokens(server: LiveServer, n: int) -> None:
    """OpenAI's helper raises if a response is cut at its length, so a regex ends this response."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "seed": 3, "n": n}
    asked["extra_body"] = {"guided_regex": "[a-z]{8}"}
    client = server.client(strict=False)
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        together = stream.get_final_completion()
    assert len(together.choices) == n
    for choice, expected in zip(together.choices, whole.choices, strict=True):
        exits = choice.message.model_extra["nvium"]
        assert len(exits["exits"]) >= 8
        assert exits["token_ids"] == expected.model_extra["nvium"]["token_ids"]
        assert exits["exit_probabilities"] == pytest.approx(expected.model_extra["nvium"]["exit_probabilities"])


def test_the_last_chunk_has_no_exits_if_metadata_is_off(server: LiveServer) -> None:
    chunks = streamed(server, max_tokens=3, nvium={"metadata": False})
    assert "nvium" not in chunks[-1]["choices"][0]["delta"]


def test_tokens_equal_the_engines_for_the_templates_prompt(server: LiveServer, byte_model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.8, top_k=50, ignore_eos=True, sampling="mixture")
    [expected] = Engine(byte_model.model).generate([PROMPT], params)
    asked = {"max_tokens": 20, "seed": 5, "temperature": 0.8, "top_k": 50, "ignore_eos": True}
    body = server.chat(**asked, nvium={"sampling": "mixture"}, return_token_ids=True).json()
    assert body["prompt_token_ids"] == PROMPT
    assert body["choices"][0]["nvium"]["token_ids"] == body["choices"][0]["token_ids"] == expected.token_ids
    assert body["nvium"]["exit_counts"] == [0, 0, 20]


def test_a_stream_begins_with_roles_and_ends_each_choice_with_its_reason(server: LiveServer) -> None:
    chunks = streamed(server, n=2, max_tokens=4, ignore_eos=True, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    opening = {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[:2]] == [opening, opening]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length", "length"]
    assert all("role" not in choice["delta"] for choice in choices[2:])
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT] + [None] * (len(chunks) - 1)
    assert [number for number, chunk in enumerate(chunks) if "nvium" in chunk] == [len(chunks) - 1]
    assert sum(chunks[-1]["nvium"]["exit_counts"]) == 8


def test_logprobs_of_partial_characters_contain_their_bytes(server: LiveServer) -> None:
    choice = server.chat(max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=3).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [
        list(END_OF_TEXT.encode()) if i == 0 else [i - 1] for i in choice["nvium"]["token_ids"]
    ]
    parts = [entry for entry in entries if entry["bytes"][0] >= 128]
    assert parts
    assert all(entry["token"] == f"bytes:\\x{entry['bytes'][0]:02x}" for entry in parts)
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] <= tops[0] + 1e-12
    alone = server.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in alone] == [[]] * len(alone)


def test_the_default_max_tokens_is_the_rest_of_the_context(byte_model: LoadedModel) -> None:
    with live_server(byte_model, context=40, max_new_tokens=30) as server:
        free = server.chat(ignore_eos=True).json()
        assert free["usage"]["total_tokens"] == 40
        assert free["choices"][0]["finish_reason"] == "length"
        shared = server.chat("a", ignore_eos=True, n=3).json()
        assert [len(choice["nvium"]["token_ids"]) for choice in shared["choices"]] == [10] * 3
        assert error_of(server.chat("a", n=3, max_tokens=11))["param"] == "max_tokens"
        assert error_of(server.chat("a", n=3, max_completion_tokens=11))["param"] == "max_completion_tokens"
        same = server.chat("a", max_tokens=2, max_completion_tokens=2, ignore_eos=True).json()
        assert same["usage"]["completion_tokens"] == 2


def test_a_prompt_longer_than_the_context_is_refused(byte_model: LoadedModel) -> None:
    with live_server(byte_model, context=40) as server:
        error = error_of(server.chat("a" * 50))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert "40" in error["message"]
        error = error_of(server.chat(max_completion_tokens=30))
        assert (error["param"], error["code"]) == ("max_completion_tokens", "context_length_exceeded")


def test_with_the_plain_template_generation_stops_before_the_users_next_turn(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        free = server.chat(max_tokens=80, ignore_eos=True).json()["choices"][0]["message"]["content"]
        stop = next(character for character in free[5:] if character.isascii())
        server.service.chat_template.stops = (stop,)
        cut = server.chat(max_tokens=80).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (free[: free.index(stop)], "stop")
        assert server.chat(max_tokens=80, ignore_eos=True).json()["choices"][0]["message"]["content"] == free


def test_an_exception_of_the_template_is_a_400() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with live_server(model) as server:
        response = server.chat()
        assert response.status_code == 400
        assert "no system messages" in error_of(response)["message"]
        assert error_of(response)["param"] == "messages"


def test_a_tokenizers_own_template_is_used() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "<|endoftext|>{{ messages[0].content }}"
    with live_server(model) as server:
        body = server.chat("<|endoftext|>", max_tokens=1, return_token_ids=True).json()
        assert body["prompt_token_ids"] == [0, *token_ids("<|endoftext|>")]


def users_in(logs: Sequence[Any]) -> list[str | None]:
    return [line["user"] for line in logs if line["event"] == "request"]


def test_the_user_is_logged_with_unsafe_characters_replaced(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server, capture_logs() as logs:
        server.chat(max_tokens=1, user="a\nb" + "x" * 100)
        server.chat(max_tokens=1, user="a", safety_identifier="b")
        server.complete(max_tokens=1, user="c")
        server.complete(max_tokens=1)
        wait_until(lambda: len(users_in(logs)) == 4)
    assert users_in(logs) == ["a?b" + "x" * 61, "b", "c", None]
    assert structlog.is_configured()


NEUTRAL: Json = {
    "store": False,
    "metadata": {},
    "service_tier": "auto",
    "reasoning_effort": "none",
    "verbosity": "medium",
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "moderation": None,
    "web_search_options": None,
    "functions": [],
    "function_call": "none",
    "prompt_cache_key": "mine",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory",
    "logprobs": False,
    "top_logprobs": None,
    "stream_options": None,
    "max_tokens": None,
}


def test_neutral_values_of_unsupported_fields_are_accepted(server: LiveServer) -> None:
    response = server.chat(max_completion_tokens=1, **NEUTRAL)
    assert response.status_code == 200
    assert "x-nvium-ignored-params" not in response.headers


def test_ignored_schema_keywords_are_named(server: LiveServer) -> None:
    names = {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "maxItems": 2}
    parameters = {"type": "object", "properties": {"names": names}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert "x-nvium-ignored-params" not in server.chat(tools=[tool], tool_choice="none", max_tokens=1).headers
    ignored = server.chat(tools=[tool], max_tokens=1).headers["x-nvium-ignored-params"]
    assert ignored == "tools.f.parameters.properties.names.uniqueItems"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    ignored = server.chat(response_format=schema, max_tokens=1).headers["x-nvium-ignored-params"]
    assert ignored == "response_format.json_schema.schema.properties.names.uniqueItems"
    ignored = server.chat(max_tokens=1, guided_json=names).headers["x-nvium-ignored-params"]
    assert ignored == "guided_json.uniqueItems"


def test_unknown_fields_within_messages_are_named(server: LiveServer) -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}, "more": 1}
    response = server.chat(max_tokens=1, messages=[{"role": "user", "content": [part], "x y": 1}], best_of=1)
    assert response.headers["x-nvium-ignored-params"] == "best_of, messages[0].x?y, messages[0].content[0].more"


def say(**message: Any) -> Json:
    return {"messages": [{"role": "user", "content": "a"}, message]}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

INVALID: list[tuple[str, Json]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "Hello"}),
    ("messages", {"messages": [{"role": "user", "content": "a"}] * 4097}),
    ("messages[0]", {"messages": ["Hello"]}),
    ("messages[1].role", say(role="function", name="f", content="a")),
    ("messages[1].role", say(content="a")),
    ("messages[1].content", say(role="user")),
    ("messages[1].content", say(role="user", content=5)),
    ("messages[1].content", say(role="user", content=["a"])),
    ("messages[0].prefix", {"messages": [{"role": "user", "content": "a", "prefix": True}]}),
    ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "{% for a in range(9) %}"}}),
    ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs.tokenize", {"chat_template_kwargs": {"tokenize": True}}),
    (
        "continue_final_message",
        say(role="assistant", content="a", tool_calls=[CALL]) | {"continue_final_message": True},
    ),
    ("metadata", {"metadata": {"a" * 65: "b"}}),
    ("metadata", {"metadata": {"a": "b" * 513}}),
    ("metadata", {"metadata": {str(n): "b" for n in range(17)}}),
    ("messages[1].content[0].type", say(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])),
    ("messages[1].content[0].text", say(role="user", content=[{"type": "text"}])),
    ("messages[1].name", say(role="user", content="a", name="a b")),
    ("messages[1].audio", say(role="assistant", content="a", audio={"id": "x"})),
    ("messages[1].function_call", say(role="assistant", content="a", function_call={"name": "f", "arguments": ""})),
    ("messages[1].refusal", say(role="user", content="a", refusal="no")),
    ("messages[1].tool_call_id", say(role="tool", content="a")),
    ("messages[1].tool_call_id", say(role="user", content="a", tool_call_id="1")),
    ("messages[1].tool_calls", say(role="user", content="a", tool_calls=[CALL])),
    ("messages[1].tool_calls[0].type", say(role="assistant", tool_calls=[CALL | {"type": "custom"}])),
    (
        "messages[1].tool_calls[0].function.arguments",
        say(role="assistant", tool_calls=[CALL | {"function": {"name": "f"}}]),
    ),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("top_logprobs", {"top_logprobs": -1, "logprobs": True}),
    ("n", {"n": 129}),
    ("store", {"store": True}),
    ("service_tier", {"service_tier": "priority"}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("audio", {"audio": {"voice": "x", "format": "wav"}}),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ("moderation", {"moderation": {"model": "x"}}),
    ("web_search_options", {"web_search_options": {}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": "auto"}),
    ("prompt_cache_options", {"prompt_cache_options": {"mode": "explicit"}}),
    ("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
]


@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_an_invalid_field_is_refused_by_name(server: LiveServer, param: str, fields: Json) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"].removesuffix(".a") == param


def test_every_message_that_the_server_returns_is_accepted(server: LiveServer) -> None:
    """A required call that is cut before its name has neither content nor calls."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    [cut] = server.chat(tools=tools, tool_choice="required", max_tokens=2).json()["choices"]
    assert cut["message"] == {"role": "assistant", "content": None, "refusal": None}
    user = {"role": "user", "content": "a"}
    for message in (cut["message"], {"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": []}):
        body = server.chat(messages=[user, message, user], max_tokens=1, return_token_ids=True).json()
        assert body["prompt_token_ids"] == token_ids("User:\na\n\nAssistant:\n\nUser:\na\n\nAssistant:\n")


def test_metadata_is_sent_once(server: LiveServer) -> None:
    *others, last = streamed(server, max_tokens=9, ignore_eos=True, metadata={"a": "b"})
    assert others and not any("metadata" in chunk for chunk in others)
    assert last["metadata"] == {"a": "b"}


def test_clamp_max_tokens_shortens_a_limit_beyond_the_context(byte_model: LoadedModel) -> None:
    with live_server(byte_model, context=40, clamp_max_tokens=True) as server:
        for name in ("max_tokens", "max_completion_tokens"):
            response = server.chat(ignore_eos=True, **{name: 8000})
            assert response.json()["usage"]["total_tokens"] == 40
            assert response.headers["x-nvium-ignored-params"] == name
        assert server.complete(ignore_eos=True, n_predict=8000).headers["x-nvium-ignored-params"] == "n_predict"
        asked = {"model": NAME, "input": "a", "max_output_tokens": 8000}
        response = server.http.post("/v1/responses", json=asked)
        assert response.headers["x-nvium-ignored-params"] == "max_output_tokens"
        assert "x-nvium-ignored-params" not in server.chat(max_tokens=2).headers
        assert error_of(server.complete(prompt="a" * 50))["code"] == "context_length_exceeded"
