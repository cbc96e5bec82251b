"""Calls of models that have special tokens for them, calls that the prompt has begun, and calls that repeat."""

import json
from typing import Any

import pytest

from nvium_core import LoadedModel
from tests.byte_model import EXIT_LAYERS, NAME, load_byte_model, token_ids
from tests.random_models import random_model
from tests.server.live_server import LiveServer, live_server
from tests.server.scripted_answers import answering
from tests.server.test_refusals import error_of
from tests.server.test_tools import CALL, STOP, TOOLS, WEATHER, streamed

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
    """Names of special tokens as these tokens."""
    for number, name in enumerate(SPECIAL, start=257):
        head, found, rest = text.partition(name)
        if found:
            return [*in_tokens(head), number, *in_tokens(rest)]
    return token_ids(text)


def calls_of(choice: Json) -> list[tuple[str, Json]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_special_tokens_open_calls_and_arguments_after_any_text() -> None:
    answer = in_tokens(f"Gut.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]stop[ARGS]{{}}")
    with live_server(with_special_tokens()) as server:
        with answering(server.app, answer, answer):
            whole = server.chat(tools=TOOLS).json()["choices"][0]
            chunks = streamed(server, tools=TOOLS)
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Gut.", "tool_calls")
        assert calls_of(whole) == [("get_weather", json.loads(WEATHER)), ("stop", {})]
        pieces = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
        assert "".join(piece["arguments"] for piece in pieces) == WEATHER + "{}"
        with answering(server.app, in_tokens("[TOOL_CALLS]other")):
            assert server.chat(tools=TOOLS).json()["error"]["code"] == "no_token_allowed"
        answered = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": whole["message"]["tool_calls"][:1]},
            {"role": "tool", "content": "2", "tool_call_id": whole["message"]["tool_calls"][0]["id"]},
        ]
        again = server.chat(messages=answered, tools=TOOLS, max_tokens=1, return_token_ids=True)
    assert again.status_code == 200, "the template takes the id that the call was given"
    assert again.json()["prompt_token_ids"][-len(in_tokens("tool 2")) :] == in_tokens("tool 2")


def test_a_required_call_is_made_with_special_tokens() -> None:
    with live_server(with_special_tokens()) as server:
        for seed in range(3):
            asked: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            assert len(calls_of(server.chat(**asked).json()["choices"][0])) == 1


def test_calls_that_are_no_json_are_refused_by_name_and_text_is_not() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{# <tool_call><function=f><parameter=p> #}{{ messages[0].content }}"
    with live_server(model) as server:
        error = error_of(server.chat(tools=TOOLS))
        assert (error["param"], "Qwen3-Coder" in error["message"]) == ("tools", True)
        assert server.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


def begun(text: str, **more: Any) -> Json:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    return {"messages": turns, "continue_final_message": True, "tools": TOOLS, **more}


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize("length", [3, 10, 20, 36, 41, 45, 60])
def test_a_call_that_the_prompt_has_begun_goes_on_and_is_told_whole(
    server: LiveServer, tool_choice: str, length: int
) -> None:
    asked = begun(CALL[:length], tool_choice=tool_choice)
    with answering(server.app, CALL[length:], CALL[length:]):
        whole = server.chat(**asked).json()["choices"][0]
        chunks = streamed(server, **asked)
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert calls_of(whole) == [("get_weather", json.loads(WEATHER))]
    pieces = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert ("".join(p.get("name", "") for p in pieces), "".join(p["arguments"] for p in pieces)) == (
        "get_weather",
        WEATHER,
    )


def test_whitespace_in_what_the_prompt_has_begun_does_no_harm(server: LiveServer) -> None:
    with answering(server.app, 'Köln","when":"now"}}'):
        choice = server.chat(**begun('{"name": "get_weather", "arguments": {"place": "')).json()["choices"][0]
    assert calls_of(choice) == [("get_weather", json.loads(WEATHER))]


@pytest.mark.parametrize("text", ["Let me see", '{"na', '{"name": "unknown", "argu'])
def test_text_that_the_prompt_has_begun_goes_on_as_text_and_is_not_repeated(server: LiveServer, text: str) -> None:
    with answering(server.app, "rrow"):
        choice = server.chat(**begun(text)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("rrow", "stop")


def test_a_form_goes_on_from_its_beginning(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}
    with answering(server.app, "7}"):
        choice = server.chat(**begun('{"a": ', tools=[], response_format=form)).json()["choices"][0]
    assert choice["message"]["content"] == "7}"


def test_thoughts_that_the_prompt_has_begun_go_on_as_thoughts() -> None:
    model = load_byte_model()
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}"
    with live_server(model) as server, answering(server.app, "der.</think>Yes."):
        choice = server.chat(**begun("<think>I won", tools=[])).json()["choices"][0]
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
def test_required_calls_end_before_one_is_repeated(server: LiveServer, answer: str, num_calls: int) -> None:
    asked: Json = {"tools": TOOLS, "tool_choice": "required"}
    with answering(server.app, answer, answer):
        whole = server.chat(**asked).json()["choices"][0]
        chunks = streamed(server, **asked)
    made = answer.split("\n")[:num_calls]
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert calls_of(whole) == [(json.loads(call)["name"], json.loads(call)["arguments"]) for call in made]
    pieces = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    expected = [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]
    assert "".join(piece["arguments"] for piece in pieces) == "".join(expected)


def test_the_model_may_repeat_calls_that_it_chose_to_make(server: LiveServer) -> None:
    with answering(server.app, f"{STOP}\n{STOP}"):
        assert len(calls_of(server.chat(tools=TOOLS).json()["choices"][0])) == 2
