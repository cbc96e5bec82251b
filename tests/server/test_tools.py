"""Tool calls: required, optional, streamed, and in the formats of chat templates."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.byte_model import NAME, load_byte_model, token_ids
from tests.server.live_server import LiveServer, live_server
from tests.server.scripted_answers import answering
from tests.server.test_refusals import error_of

Json = dict[str, Any]

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


def test_a_required_call_names_one_of_the_functions(server: LiveServer) -> None:
    schemas: Json = {"get_weather": PARAMETERS, "stop": {"const": {}}}
    names = set()
    for seed in range(12):
        body = server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed).json()
        [call] = body["choices"][0]["message"]["tool_calls"]
        names.add(call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert names == schemas.keys()


def test_a_truncated_call_ends_with_length(server: LiveServer) -> None:
    choice = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=45).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    early = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=12).json()["choices"][0]
    assert early["finish_reason"] == "length"
    assert early["message"] == {"role": "assistant", "content": None, "refusal": None}


def test_duplicate_tools_are_merged(server: LiveServer) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True}
    once, twice = (server.chat(tools=tools, **asked).json() for tools in (TOOLS, TOOLS * 2))
    assert once["prompt_token_ids"] == twice["prompt_token_ids"]


def test_tool_choice_none_hides_the_tools(server: LiveServer) -> None:
    plain = server.chat(max_tokens=9, return_token_ids=True).json()
    unused = server.chat(max_tokens=9, return_token_ids=True, tools=TOOLS, tool_choice="none").json()
    assert unused["choices"][0]["message"] == plain["choices"][0]["message"]
    assert unused["prompt_token_ids"] == plain["prompt_token_ids"]
    assert server.chat(max_tokens=1, tools=[]).status_code == 200


def test_the_template_receives_tools_calls_and_results() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = (
        "{{ tools[0].function.name }}{% for m in messages %}|{{ m.role }} {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.id }} {{ call.function.name }} {{ call.function.arguments.a }}"
        "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    with live_server(model) as server:
        asked = {"tools": [tool("f")], "tool_choice": "required", "max_tokens": 1, "return_token_ids": True}
        body = server.chat(messages=messages, **asked).json()
    assert body["prompt_token_ids"] == token_ids("f|user hi|assistant c1 f 1|tool 2c1")


def streamed(server: LiveServer, **body: Any) -> list[Json]:
    lines = server.chat(stream=True, **body).text.split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


def streamed_calls(chunks: list[Json]) -> list[Json]:
    """Return the pieces of calls in streamed choices."""
    return [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]


def joined(pieces: list[Json], name: str) -> str:
    return "".join(piece.get(name, "") for piece in pieces)


def test_a_streamed_call_starts_with_its_name(server: LiveServer) -> None:
    first, *choices = streamed(server, tools=TOOLS, tool_choice=NAMED)
    assert first["delta"] == {"role": "assistant", "content": None}
    begun, *rest = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(delta.keys() == {"index", "function"} for delta in rest)
    assert all(delta["function"].keys() == {"arguments"} for delta in rest)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, 90),
    n=st.integers(1, 3),
    stop=st.none() | st.sampled_from(['"', "o", "東", "}"]),
)
def test_joined_chunks_equal_the_whole(
    server: LiveServer, seed: int, max_tokens: int, n: int, stop: str | None
) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": max_tokens, "n": n, "stop": stop}
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
def test_an_answer_may_be_text_under_auto(server: LiveServer, text: str, tool_choice: Json) -> None:
    with answering(server.app, text, text):
        whole = server.chat(tools=TOOLS, **tool_choice).json()["choices"][0]
        chunks = streamed(server, tools=TOOLS, **tool_choice)
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in whole["message"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (CALL, ["get_weather"]),
        (f"{CALL}\n{STOP}\n{CALL}", ["get_weather", "stop", "get_weather"]),
        (f"\n {STOP}", ["stop"]),
    ],
)
def test_one_or_more_calls_are_returned_whole_and_streamed(server: LiveServer, text: str, names: list[str]) -> None:
    client = server.client()
    asked: Json = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS}
    with answering(server.app, text, text):
        choice = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed_choice = stream.until_done().get_final_completion().choices[0]
    for answer in (choice, streamed_choice):
        assert (answer.finish_reason, answer.message.content or None) == ("tool_calls", None)
        calls = [call.function for call in answer.message.tool_calls or []]
        assert [call.name for call in calls] == names
        assert [json.loads(call.arguments) for call in calls] == [
            {"place": "Köln", "when": "now"} if name == "get_weather" else {} for name in names
        ]
    assert len({call.id for call in choice.message.tool_calls or []}) == len(names)


@pytest.mark.parametrize("broken", ['{"name": "get_weather", "arguments": {"place":"Rome"', '{"name": "g"'])
def test_an_answer_that_starts_like_a_call_must_be_one(server: LiveServer, broken: str) -> None:
    with answering(server.app, broken):
        response = server.chat(tools=TOOLS)
    assert response.json()["error"]["code"] == "no_token_allowed", "the grammar allows none of the script's next tokens"


@pytest.mark.parametrize("before", ["", "I look. "])
def test_an_answer_with_an_opening_tag_must_be_a_call(before: str) -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{# <tool_call> #}{{ messages[0].content }}"
    with live_server(model) as server, answering(server.app, f'{before}<tool_call>\n{{"name": "other'):
        assert server.chat(tools=TOOLS).json()["error"]["code"] == "no_token_allowed"


def test_parallel_tool_calls_false_allows_one_call(server: LiveServer) -> None:
    with answering(server.app, f"{CALL}\n{CALL}"):
        choice = server.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.usefixtures("one_by_one")
def test_arguments_are_streamed_incrementally(server: LiveServer) -> None:
    with answering(server.app, CALL):
        chunks = streamed(server, tools=TOOLS)
    assert len([piece for piece in streamed_calls(chunks) if piece["arguments"]]) > 10


def test_with_a_response_format_an_answer_is_a_call_or_matches_the_schema(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    with answering(server.app, '{"name":"Ada"}', STOP):
        text = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
        call = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
    assert (text["message"]["content"], text["finish_reason"]) == ('{"name":"Ada"}', "stop")
    assert (call["message"]["tool_calls"][0]["function"]["name"], call["finish_reason"]) == ("stop", "tool_calls")


TEMPLATES = {
    "hermes": (
        "<tool_call>",
        f"I look. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
        "I look. ",
    ),
    "hermes, at once": ("<tool_call>", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>", None),
    "llama": ('"parameters": ', f"{CALL}; {STOP}".replace("arguments", "parameters"), None),
    "mistral": ("[TOOL_CALLS]", f"[{CALL}, {STOP}]", None),
    "newer mistral": (
        "[TOOL_CALLS][ARGS]",
        f"I look.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]stop[ARGS]{{}}",
        "I look.",
    ),
    "mistral with ids": (
        "[TOOL_CALLS][CALL_ID][ARGS]",
        f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER}[TOOL_CALLS]stop[CALL_ID]a1b2c3d4f[ARGS]{{}}",
        None,
    ),
}


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_calls_in_the_format_of_the_chat_template_are_parsed(family: str) -> None:
    sign, text, content = TEMPLATES[family]
    model = load_byte_model()
    model.tokenizer.chat_template = f"{{# {sign} #}}{{{{ messages[0].content }}}}"
    with live_server(model) as server, answering(server.app, text):
        choice = server.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "stop"]


INVALID: list[tuple[str, Json]] = [
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": NAMED}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("tools", {"tools": [tool("f"), tool("f", description="g")]}),
    ("tools", {"tools": [tool("f")] * 129, "tool_choice": "none"}),
    ("tools", {"tools": [tool("f", parameters={"type": "array"})], "tool_choice": "required"}),
    ("tools", {"tools": [tool("f", parameters={"properties": 5}, strict=True)], "tool_choice": "required"}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ("tools[0].function.name", {"tools": [tool("a b")]}),
    ("tools[1].function.parameters", {"tools": [tool("a"), tool("b", parameters=[])]}),
    ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
]


@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_an_invalid_tool_field_is_refused_with_its_name(server: LiveServer, param: str, fields: Json) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
