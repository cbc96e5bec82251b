"""Calls with special tokens, calls that start in the prompt, and repeated calls."""

import json
from typing import Any

import pytest

from nvium_core import LoadedModel
from tests.byte_model import EXIT_LAYERS, NAME, load_byte_model, token_ids
from tests.random_models import random_model
from tests.server.live_server import LiveServer, live_server
from tests.server.scripted_answers import answering
from tests.server.test_refusals import error_of
from tests.server.test_tools import CALL, STOP, TOOLS, WEATHER, joined, streamed, streamed_calls

Json = dict[str, Any]

SPECIAL = ["[TOOL_CALLS]", "[ARGS]"]


def with_special_tokens() -> LoadedModel:
    tokenizer = load_byte_model().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% if call.id|length != 9 %}{{ raise_exception('Tool call IDs should have 9 characters') }}{% endif %}"
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments|tojson }}{% endfor %}{% endfor %}"
    )
    return LoadedModel(NAME, random_model(EXIT_LAYERS, vocab_size=260, context=4096), tokenizer)


def in_tokens(text: str) -> list[int]:
    """Tokenize a text and its special tokens."""
    for number, name in enumerate(SPECIAL, start=257):
        head, found, rest = text.partition(name)
        if found:
            return [*in_tokens(head), number, *in_tokens(rest)]
    return token_ids(text)


def calls_of(choice: Json) -> list[tuple[str, Json]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_special_tokens_start_calls_and_arguments_after_any_text() -> None:
    answer = in_tokens(f"Gut.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]stop[ARGS]{{}}")
    with live_server(with_special_tokens()) as server:
        with answering(server.app, answer, answer):
            whole = server.chat(tools=TOOLS).json()["choices"][0]
            chunks = streamed(server, tools=TOOLS)
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Gut.", "tool_calls")
        assert calls_of(whole) == [("get_weather", json.loads(WEATHER)), ("stop", {})]
        assert joined(streamed_calls(chunks), "arguments") == WEATHER + "{}"
        with answering(server.app, in_tokens("[TOOL_CALLS]other")):
            assert server.chat(tools=TOOLS).json()["error"]["code"] == "no_token_allowed"
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": whole["message"]["tool_calls"][:1]},
            {"role": "tool", "content": "2", "tool_call_id": whole["message"]["tool_calls"][0]["id"]},
        ]
        again = server.chat(messages=history, tools=TOOLS, max_tokens=1, return_token_ids=True)
    assert again.status_code == 200, "the template accepts the generated call id"
    assert again.json()["prompt_token_ids"][-len(in_tokens("tool 2")) :] == in_tokens("tool 2")


def test_a_required_call_works_with_special_tokens() -> None:
    with live_server(with_special_tokens()) as server:
        for seed in range(3):
            asked: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            assert len(calls_of(server.chat(**asked).json()["choices"][0])) == 1


def test_the_tools_of_a_template_without_json_calls_are_refused() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{# <tool_call><function=f><parameter=p> #}{{ messages[0].content }}"
    with live_server(model) as server:
        error = error_of(server.chat(tools=TOOLS))
        assert (error["param"], "Qwen3-Coder" in error["message"]) == ("tools", True)
        assert server.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


def continuing(text: str, **more: Any) -> Json:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    return {"messages": turns, "continue_final_message": True, "tools": TOOLS, **more}


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize("length", [3, 10, 20, 36, 41, 45, 60])
def test_a_call_that_starts_in_the_prompt_is_returned_whole(server: LiveServer, tool_choice: str, length: int) -> None:
    asked = continuing(CALL[:length], tool_choice=tool_choice)
    with answering(server.app, CALL[length:], CALL[length:]):
        whole = server.chat(**asked).json()["choices"][0]
        chunks = streamed(server, **asked)
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert calls_of(whole) == [("get_weather", json.loads(WEATHER))]
    pieces = streamed_calls(chunks)
    assert (joined(pieces, "name"), joined(pieces, "arguments")) == ("get_weather", WEATHER)


def test_a_call_in_the_prompt_may_contain_whitespace(server: LiveServer) -> None:
    with answering(server.app, 'Köln","when":"now"}}'):
        choice = server.chat(**continuing('{"name": "get_weather", "arguments": {"place": "')).json()["choices"][0]
    assert calls_of(choice) == [("get_weather", json.loads(WEATHER))]


@pytest.mark.parametrize("text", ["Let me see", '{"na', '{"name": "unknown", "argu'])
def test_text_in_the_prompt_is_continued_and_not_repeated(server: LiveServer, text: str) -> None:
    with answering(server.app, "rrow"):
        choice = server.chat(**continuing(text)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("rrow", "stop")


def test_json_that_starts_in_the_prompt_is_continued(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}
    with answering(server.app, "7}"):
        choice = server.chat(**continuing('{"a": ', tools=[], response_format=form)).json()["choices"][0]
    assert choice["message"]["content"] == "7}"


def test_reasoning_that_starts_in_the_prompt_is_continued() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}"
    with live_server(model) as server, answering(server.app, "der.</think>Yes."):
        choice = server.chat(**continuing("<think>I won", tools=[])).json()["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("der.", "Yes.")


OTHER = CALL.replace("now", "later")


@pytest.mark.parametrize(
    ("answer", "num_calls"),
    [
        (f"{CALL}\n{CALL}\n{STOP}", 1),
        (f"{CALL}\n{OTHER}\n{STOP}\n{OTHER}\n{CALL}", 3),
        (f"{STOP}\n{CALL}", 2),
    ],
)
def test_required_calls_end_before_a_repeated_call(server: LiveServer, answer: str, num_calls: int) -> None:
    asked: Json = {"tools": TOOLS, "tool_choice": "required"}
    with answering(server.app, answer, answer):
        whole = server.chat(**asked).json()["choices"][0]
        chunks = streamed(server, **asked)
    made = answer.split("\n")[:num_calls]
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert calls_of(whole) == [(json.loads(call)["name"], json.loads(call)["arguments"]) for call in made]
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert joined(streamed_calls(chunks), "arguments") == joined(calls, "arguments")


def test_optional_calls_may_repeat(server: LiveServer) -> None:
    with answering(server.app, f"{STOP}\n{STOP}"):
        assert len(calls_of(server.chat(tools=TOOLS).json()["choices"][0])) == 2
