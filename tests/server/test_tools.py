"""Tool calls: required, optional, streamed, in the formats of templates, with special tokens, in continued turns."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import LoadedModel
from nvium_core.engine.schedule import scheduler
from tests.byte_model import EXIT_LAYERS, NAME, load_byte_model, token_ids
from tests.random_models import random_model
from tests.server.live_server import LiveServer, live_server, template_server
from tests.server.raw_client import Json, error_of, events_of
from tests.server.scripted_answers import answering

PARAMETERS: Json = {
    "type": "object",
    "properties": {"place": {"enum": ["Köln", "東京"]}, "when": {"enum": ["now", "later"]}},
    "required": ["place", "when"],
    "additionalProperties": False,
}


def tool(name: str, **function: Any) -> Json:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("get_weather", description="The weather.", parameters=PARAMETERS, strict=True), tool("stop")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SHOWS_TOOLS = "{{ tools }}{{ messages[0].content }}"
"""A chat template that supports tools."""


def test_a_required_call_names_one_of_the_functions(server):
    schemas: Json = {"get_weather": PARAMETERS, "stop": {"const": {}}}
    names = set()
    for seed in range(12):
        body = server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed).json()
        [call] = body["choices"][0]["message"]["tool_calls"]
        names.add(call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert names == schemas.keys()


def test_a_truncated_call_ends_with_length(server):
    choice = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=45).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    early = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=12).json()["choices"][0]
    assert early["finish_reason"] == "length"
    assert early["message"] == {"role": "assistant", "content": None, "refusal": None}


def test_duplicate_tools_are_merged_and_tool_choice_none_hides_tools(server):
    asked = {"max_tokens": 9, "return_token_ids": True}
    tools = ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}, {"tools": TOOLS * 2})
    plain, unused, once, twice = (server.chat(**asked, **more).json() for more in tools)
    assert once["prompt_token_ids"] == twice["prompt_token_ids"]
    assert unused["choices"][0]["message"] == plain["choices"][0]["message"]
    assert unused["prompt_token_ids"] == plain["prompt_token_ids"]
    assert server.chat(max_tokens=1, tools=[]).status_code == 200


def test_custom_tools_are_ignored_and_named(server):
    custom = {"type": "custom", "custom": {"name": "patch"}}
    response = server.chat(tools=[custom], max_tokens=1)
    assert response.headers["x-nvium-ignored-params"] == "tools[0].custom"
    without = server.chat(max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == without.json()["usage"]["prompt_tokens"]


def streamed(server: LiveServer, **body: Any) -> list[Json]:
    return [event["choices"][0] for event in events_of(server.chat(stream=True, **body).text)]


def streamed_calls(chunks: list[Json]) -> list[Json]:
    """Return the pieces of calls in streamed choices."""
    return [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]


def joined(pieces: list[Json], name: str) -> str:
    return "".join(piece.get(name, "") for piece in pieces)


@pytest.mark.usefixtures("one_by_one")
def test_a_streamed_call_starts_with_its_name_and_its_arguments_follow_in_pieces(server, monkeypatch):
    monkeypatch.setattr(scheduler, "MULTI_STEP_SECONDS", 0.0)  # a chunk for every token
    with answering(server.app, CALL):
        first, *choices = streamed(server, tools=TOOLS, tool_choice=NAMED)
    assert first["delta"] == {"role": "assistant", "content": None}
    begun, *rest = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(delta.keys() == {"index", "function"} for delta in rest)
    assert all(delta["function"].keys() == {"arguments"} for delta in rest)
    assert len(rest) > 10
    assert all(choice["delta"].get("tool_calls") for choice in choices if not choice["finish_reason"])
    assert [token for choice in choices for token in choice["nvium"]["token_ids"]] == token_ids(CALL)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


limits = {"seed": st.integers(0, 10**6), "max_tokens": st.integers(1, 90), "n": st.integers(1, 3)}
stops = {"stop": st.none() | st.sampled_from(['"', "o", "東", "}"])}


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries(limits | stops))
def test_joined_chunks_equal_the_whole(server, drawn):
    asked = {"tools": TOOLS, "tool_choice": "required", **drawn}
    whole = server.chat(**asked).json()["choices"]
    chunks = streamed(server, **asked)
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        for name in ("name", "arguments"):
            assert joined(streamed_calls(mine), name) == joined(calls, name)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


WEATHER = '{"place":"Köln","when":"now"}'
CALL = f'{{"name": "get_weather", "arguments": {WEATHER}}}'
STOP = '{"name": "stop", "arguments": {}}'


@pytest.mark.parametrize("tool_choice", [{}, {"tool_choice": "auto"}])
@pytest.mark.parametrize("text", ["It rains.", '{"name": not a call', "", " {"])
def test_an_answer_may_be_text_under_auto(server, text, tool_choice):
    with answering(server.app, text, text):
        whole = server.chat(tools=TOOLS, **tool_choice).json()["choices"][0]
        chunks = streamed(server, tools=TOOLS, **tool_choice)
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in whole["message"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text


@pytest.mark.parametrize("text", [CALL, f"{CALL}\n{STOP}\n{CALL}", f"\n {STOP}"])
def test_one_or_more_calls_are_returned_whole_and_streamed(server, text):
    names = re.findall("get_weather|stop", text)
    client = server.client()
    asked: Json = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS}
    with answering(server.app, text, text):
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed_choice = stream.until_done().get_final_completion().choices[0]
    for answer in (whole, streamed_choice):
        calls = answer.message.tool_calls or []
        arguments = {"get_weather": json.loads(WEATHER), "stop": {}}
        found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        assert found == [(name, arguments[name]) for name in names]
        assert (answer.finish_reason, len({call.id for call in calls})) == ("tool_calls", len(names))


@pytest.mark.parametrize("broken", ['{"name": "get_weather", "arguments": {"place":"Rome"', '{"name": "g"'])
def test_an_answer_that_starts_like_a_call_must_be_one(server, broken):
    with answering(server.app, broken):
        response = server.chat(tools=TOOLS)
    assert response.json()["error"]["code"] == "no_token_allowed", "the grammar allows none of the script's next tokens"


@pytest.mark.parametrize("before", ["", "I look. "])
def test_an_answer_with_an_opening_tag_must_be_a_call(before):
    answer = f'{before}<tool_call>\n{{"name": "other'
    with template_server("{# <tool_call> #}" + SHOWS_TOOLS) as server, answering(server.app, answer):
        assert server.chat(tools=TOOLS).json()["error"]["code"] == "no_token_allowed"


def test_with_a_response_format_an_answer_is_a_call_or_matches_the_schema(server):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    with answering(server.app, '{"name":"Ada"}', STOP):
        text = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
        call = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
    assert (text["message"]["content"], text["finish_reason"]) == ('{"name":"Ada"}', "stop")
    assert (call["message"]["tool_calls"][0]["function"]["name"], call["finish_reason"]) == ("stop", "tool_calls")


HERMES = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>"
TEMPLATES = {
    "hermes": ("<tool_call>", f"I look. {HERMES}", "I look. "),
    "hermes, at once": ("<tool_call>", HERMES, None),
    "llama": ('"parameters": ', f"{CALL}; {STOP}".replace("arguments", "parameters"), None),
    "mistral": ("[TOOL_CALLS]", f"[{CALL}, {STOP}]", None),
}


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_calls_in_the_format_of_the_chat_template_are_parsed(family):
    sign, text, content = TEMPLATES[family]
    with template_server(f"{{# {sign} #}}" + SHOWS_TOOLS) as server, answering(server.app, text):
        choice = server.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "stop"]


MARKER, MARKER_ID = "[TOOL_CALLS]", 257


def with_special_tokens() -> LoadedModel:
    tokenizer = load_byte_model().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [MARKER]})
    tokenizer.chat_template = SHOWS_TOOLS + (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% if call.id|length != 9 %}{{ raise_exception('Tool call IDs should have 9 characters') }}{% endif %}"
        "[TOOL_CALLS][{{ call.function|tojson }}]{% endfor %}{% endfor %}"
    )
    return LoadedModel(NAME, random_model(EXIT_LAYERS, vocab_size=260, context=4096), tokenizer)


def in_tokens(text: str) -> list[int]:
    """Tokenize a text and its special token."""
    head, found, rest = text.partition(MARKER)
    return [*token_ids(head), MARKER_ID, *token_ids(rest)] if found else token_ids(text)


def calls_of(choice: Json) -> list[tuple[str, Json]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_a_special_token_may_precede_calls():
    answer = in_tokens(f"[TOOL_CALLS][{CALL}, {STOP}]")
    with live_server(with_special_tokens()) as server:
        with answering(server.app, answer, answer):
            whole = server.chat(tools=TOOLS).json()["choices"][0]
            chunks = streamed(server, tools=TOOLS)
        assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
        assert calls_of(whole) == [("get_weather", json.loads(WEATHER)), ("stop", {})]
        assert joined(streamed_calls(chunks), "arguments") == WEATHER + "{}"
        with answering(server.app, in_tokens('[TOOL_CALLS][{"name": "other')):
            assert server.chat(tools=TOOLS).json()["error"]["code"] == "no_token_allowed"
        call = whole["message"]["tool_calls"][0]
        history: list[Json] = [{"role": "user", "content": "hi"}, whole["message"] | {"tool_calls": [call]}]
        history += [{"role": "tool", "content": "2", "tool_call_id": call["id"]}]
        again = server.chat(messages=history, tools=TOOLS, max_tokens=1, return_token_ids=True)
        for seed in range(3):
            asked: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            assert len(calls_of(server.chat(**asked).json()["choices"][0])) == 1
    assert again.status_code == 200, "the template accepts the generated call id"
    assert again.json()["prompt_token_ids"][-len(in_tokens("tool 2")) :] == in_tokens("tool 2")


def test_the_tools_of_a_template_without_json_calls_are_refused():
    with template_server("{# <tool_call><function=f><parameter=p> #}{{ messages[0].content }}") as server:
        error = error_of(server.chat(tools=TOOLS))
        assert (error["param"], "--chat-template" in error["message"]) == ("tools", True)
        assert server.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


def continuing(text: str, **more: Any) -> Json:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    return {"messages": turns, "continue_final_message": True, "tools": TOOLS, **more}


@pytest.mark.parametrize("text", ["Let me see", '{"na', '{"name": "unknown", "argu'])
def test_text_in_the_prompt_is_continued_and_not_repeated(server, text):
    with answering(server.app, "rrow"):
        choice = server.chat(**continuing(text)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("rrow", "stop")


@pytest.mark.parametrize("form", [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}])
def test_a_format_cannot_begin_in_the_prompt(server, form):
    assert error_of(server.chat(**continuing('{"a": ', **form)))["param"] == "continue_final_message"


def test_reasoning_that_starts_in_the_prompt_is_continued():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}"
    with template_server(template) as server, answering(server.app, "der.</think>Yes."):
        choice = server.chat(**continuing("<think>I won", tools=[])).json()["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("der.", "Yes.")


NUMBERS = [("auto", None, 2), ("auto", False, 1), ("required", None, 1), ("required", True, 2), (NAMED, True, 1)]


@pytest.mark.parametrize(("tool_choice", "is_parallel", "num_calls"), NUMBERS)
def test_several_calls_are_made_if_optional_or_asked_for(server, tool_choice, is_parallel, num_calls):
    asked: Json = {"tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": is_parallel}
    with answering(server.app, f"{CALL}\n{CALL}"):
        choice = server.chat(**asked).json()["choices"][0]
    assert calls_of(choice) == [("get_weather", json.loads(WEATHER))] * num_calls
