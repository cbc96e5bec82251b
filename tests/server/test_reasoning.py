"""Reasoning models: the reasoning is separate from the content, and can be turned off."""

from typing import Any

import openai
import pytest

from tests.byte_model import NAME, token_ids
from tests.server.live_server import server_fixture, template_server
from tests.server.raw_client import error_of
from tests.server.routes.test_openapi import check
from tests.server.routes.test_responses import events
from tests.server.scripted_answers import answering
from tests.server.test_tools import streamed

QWEN_3 = """\
{%- for message in messages -%}
<|{{ message.role }}|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{%- endif -%}"""
"""The relevant parts of Qwen3's template."""

OPENED = QWEN_3.replace(
    "<|assistant|>", "<|assistant|>{% if enable_thinking is undefined or enable_thinking %}<think>{% endif %}"
)
"""Opens the reasoning in the prompt."""

ANSWER = "<think>\nWell, 🦊 <b>?\n</think>\n\nA fox."
CALL = '<think>\nIt has to call.</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
STOP = [{"type": "function", "function": {"name": "stop"}}]


thinking = server_fixture(lambda: template_server(QWEN_3))


def test_reasoning_is_separate_from_the_content(thinking):
    with answering(thinking.app, ANSWER, ANSWER):
        message = thinking.chat().json()["choices"][0]["message"]
        deltas = [choice["delta"] for choice in streamed(thinking)]
    reasoning = dict.fromkeys(("reasoning_content", "reasoning"), "Well, 🦊 <b>?")
    assert message == {"role": "assistant", "content": "A fox.", "refusal": None} | reasoning
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


def test_without_thinking_the_answer_is_all_content(thinking):
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    with answering(thinking.app, "A fox.", "A fox."):
        message = thinking.chat(**off).json()["choices"][0]["message"]
        assert thinking.chat(enable_thinking=False).json()["choices"][0]["message"] == message
    assert error_of(thinking.chat(enable_thinking=True, **off))["param"] == "enable_thinking"
    assert message == {"role": "assistant", "content": "A fox.", "refusal": None}
    asked = {"max_tokens": 1, "return_token_ids": True}
    longer, shorter = (thinking.chat(**asked, **more).json()["prompt_token_ids"] for more in (off, {}))
    assert len(longer) == len(shorter) + len("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [QWEN_3, OPENED.replace("is undefined or", "and")])
def test_effort_turns_reasoning_on_and_off_unless_the_switch_is_given(template):
    with template_server(template) as server:

        def prompt(**asked: Any) -> tuple[str | None, list[int]]:
            response = server.chat(max_tokens=1, return_token_ids=True, **asked)
            return response.headers.get("x-nvium-ignored-params"), response.json()["prompt_token_ids"]

        on, off = ({"chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (True, False))
        assert prompt(reasoning_effort="none") == prompt(**off) == (None, prompt(enable_thinking=False)[1])
        assert prompt(reasoning_effort="low") == prompt(**on) != prompt(**off)
        assert prompt(reasoning_effort="none", **on) == ("reasoning_effort", prompt(**on)[1])
        client = server.client()
        for effort, switch in (("none", off), ("high", on)):
            counted = client.responses.input_tokens.count(input="Hello", reasoning={"effort": effort})  # type: ignore[typeddict-item]
            assert counted.input_tokens == len(prompt(**switch)[1])


def test_an_answer_may_have_reasoning_and_calls():
    with template_server(QWEN_3 + "{{ tools }}{#<tool_call>#}") as server, answering(server.app, CALL):
        choice = server.chat(tools=STOP).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "It has to call."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}


def test_the_template_receives_earlier_reasoning_of_the_assistant_only(thinking):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("reasoning_content", "reasoning"):
        messages = [turns[0], turns[1] | {name: "hm"}, turns[0]]
        ids = thinking.chat(messages=messages, max_tokens=1, return_token_ids=True).json()["prompt_token_ids"]
        assert "<think>hm</think>b" in thinking.http.post("/v1/detokenize", json={"tokens": ids}).json()["prompt"]
    refused = thinking.chat(messages=[turns[0] | {"reasoning_content": "hm"}])
    assert error_of(refused)["param"] == "messages[0].reasoning_content"


@pytest.mark.usefixtures("one_by_one")
def test_a_response_has_a_reasoning_item(thinking):
    client: openai.OpenAI = thinking.client()
    asked: Any = {"model": NAME, "input": "Who?"}
    with answering(thinking.app, ANSWER, ANSWER, ANSWER):
        raw = events(thinking, input="Who?")
        response = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            typed = list(stream)
            streamed = stream.get_final_response()
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.summary == []
    assert (reasoning.content[0].text, message.type, response.output_text) == ("Well, 🦊 <b>?", "message", "A fox.")
    assert streamed.output_text == "A fox."
    pieces = [event.delta for event in typed if event.type == "response.reasoning_text.delta"]
    assert len(pieces) > 1 and "".join(pieces) == "Well, 🦊 <b>?"
    assert [event.item.type for event in typed if event.type == "response.output_item.done"] == ["reasoning", "message"]
    for event in raw:
        check({"$ref": "#/components/schemas/ResponseEvent"}, event)
    assert response.usage
    num_thinking = response.usage.output_tokens_details.reasoning_tokens
    assert num_thinking == len(token_ids(ANSWER.partition("</think>")[0] + "</think>"))


def test_the_template_receives_the_reasoning_of_an_earlier_response(thinking):
    client: openai.OpenAI = thinking.client()
    with answering(thinking.app, ANSWER, "No."):
        first = client.responses.create(model=NAME, input="Who?")
        by_id = client.responses.create(model=NAME, input="Sure?", previous_response_id=first.id)
    history: Any = [{"role": "user", "content": "Who?"}, *first.output, {"role": "user", "content": "Sure?"}]
    with answering(thinking.app, "No."):
        by_input = client.responses.create(model=NAME, input=history)
    prompt = "<|user|>Who?\n<|assistant|><think>Well, 🦊 <b>?</think>A fox.\n<|user|>Sure?\n<|assistant|>"
    assert by_id.usage and by_input.usage
    assert by_id.usage.input_tokens == by_input.usage.input_tokens == len(token_ids(prompt))
