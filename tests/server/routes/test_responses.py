import json
import re
from itertools import chain
from typing import Any

import pytest

from server.routes.responses import ResponseStore
from tests.byte_model import NAME, token_ids
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import Json, error_of, events_of
from tests.server.routes.test_openapi import check
from tests.server.scripted_answers import answering
from tests.server.writers.test_answers import rounded

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '{"name": "get_weather", "arguments": {"city":"Bern"}}'


def ask(server: LiveServer, **body: Any) -> Any:
    return server.http.post("/v1/responses", json={"model": NAME, "input": "Hello", "seed": 1, **body})


def events(server: LiveServer, **body: Any) -> list[Json]:
    """Return the events of a streamed response. Check that each has the name of its type."""
    text = ask(server, stream=True, **body).text
    parsed = events_of(text)
    assert re.findall(r"^event: (.*)\ndata: \{", text, re.MULTILINE) == [event["type"] for event in parsed]
    return parsed


def test_a_response_has_the_text_of_a_chat(server):
    response = server.client().responses.create(
        model=NAME, input="Hello", instructions="Be kind.", max_output_tokens=9, extra_body={"seed": 1}
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    chat = server.chat(messages=messages, max_tokens=9).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.usage.output_tokens if response.usage else 0) == ("incomplete", 9)
    assert response.usage and response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    body = ask(server, instructions="Be kind.", max_output_tokens=9).json()
    check({"$ref": "#/components/schemas/Response"}, body)
    assert body["nvium"]["exits"] == chat["choices"][0]["nvium"]["exits"]
    assert body["nvium"]["exit_counts"] == chat["nvium"]["exit_counts"]


def test_the_clients_stream_equals_the_whole_response(server):
    asked: Json = {"model": NAME, "input": "Hello", "max_output_tokens": 30, "extra_body": {"seed": 1}}
    whole = server.client().responses.create(**asked)
    with server.client().responses.stream(**asked) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    chunks = events(server, max_output_tokens=30)
    assert [chunk["sequence_number"] for chunk in chunks] == [*range(len(chunks))]
    text = "".join(chunk["delta"] for chunk in chunks if chunk["type"] == "response.output_text.delta")
    assert text == chunks[-1]["response"]["output"][0]["content"][0]["text"] == whole.output_text
    for chunk in chunks:
        check({"$ref": "#/components/schemas/ResponseEvent"}, chunk)


@pytest.mark.usefixtures("one_by_one")
def test_a_function_is_called_and_its_output_is_accepted(server):
    client = server.client()
    asked: Json = {"model": NAME, "tools": [TOOL]}
    with answering(server.app, CALL, CALL, "It rains.", CALL):
        [call] = client.responses.create(input="Weather?", **asked).output
        streamed = events(server, input="Weather?", tools=[TOOL])
        assert call.type == "function_call"
        history: Any = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True)]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        final = client.responses.create(input=[*history, output], **asked)
        required = client.responses.create(input="Weather?", tool_choice="required", **asked)
    assert (final.parallel_tool_calls, required.parallel_tool_calls) == (True, False)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Bern"})
    pieces = [event["delta"] for event in streamed if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 5 and "".join(pieces) == call.arguments
    assert (final.status, final.output_text) == ("completed", "It rains.")


def test_a_response_can_be_continued_by_its_id(server):
    with answering(server.app, "One.", "Two."):
        first = ask(server, input="Count.").json()
        second = ask(server, input="On.", previous_response_id=first["id"]).json()
    assert (second["previous_response_id"], second["output"][0]["content"][0]["text"]) == (first["id"], "Two.")
    prompt = token_ids("User:\nCount.\n\nAssistant:\nOne.\n\nUser:\nOn.\n\nAssistant:\n")
    assert second["usage"]["input_tokens"] == len(prompt)
    counted = server.client().responses.input_tokens.count(input="On.", previous_response_id=first["id"])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(prompt))
    refused = server.http.post("/v1/responses/input_tokens", json={"input": [{"type": "nope"}]})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input[0].type")


def test_the_input_items_of_a_response_are_those_of_its_conversation(server):
    """Without a model, the served one answers. The client reads page after page."""
    client, call = server.client(), {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    with answering(server.app, "One.", "Two."):
        first = client.responses.create(input="Count.")
        asked: Any = [{"role": "user", "content": "On."}, call, output, {"role": "user", "content": "So?"}]
        second = client.responses.create(input=asked, previous_response_id=first.id)
    found = [*client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in found] == ["message"] * 3 + ["function_call", "function_call_output", "message"]
    texts = [item.content[0].text for item in found if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["Count.", "One.", "On.", "So?"]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in found[::-1]]
    for query in ({"limit": "0"}, {"order": "up"}, {"after": "msg_x"}, {"include[]": "x"}):
        refused = server.http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert (refused.status_code, error_of(refused)["param"]) == (400, *query)
    assert server.http.get("/v1/responses/resp_x/input_items").status_code == 404


@pytest.mark.usefixtures("one_by_one")
def test_the_text_has_the_log_probabilities_of_the_chat(server):
    """Tokens without text have none, such as end-of-text and those that a stop string cuts."""
    asked: Json = {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with answering(server.app, "Löwe\n", "Löwe\n", "Löwe\n"):
        response = server.client().responses.create(**asked, stream=False, extra_body={"stop": "e"})
        *_, last = streamed = events(server, **asked, stop="e")
        chat = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    [part] = response.output[0].content  # type: ignore[union-attr]
    [found] = last["response"]["output"][0]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in found["logprobs"]).decode() == part.text == "Löw"
    pieces = [event["logprobs"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert len(pieces) > 1 and [*chain(*pieces)] == found["logprobs"]
    assert rounded(found["logprobs"]) == rounded(chat)[:4]
    assert [entry.to_dict() for entry in part.logprobs] == found["logprobs"]


def test_truncation_drops_the_oldest_messages_that_do_not_fit(byte_model):
    turns: list[Json] = [{"role": role, "content": f"{n}" * 20} for n in range(4) for role in ("user", "assistant")]
    turns[3:3] = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x" * 40},
    ]
    asked: Json = {"instructions": "Be kind.", "input": [*turns, {"role": "user", "content": "So?"}]}
    with live_server(byte_model, context=256) as server:
        assert error_of(ask(server, **asked))["code"] == "context_length_exceeded"
        for room in (20, 90, 180):
            response = ask(server, **asked, truncation="auto", max_output_tokens=room).json()
            used = response["usage"]["input_tokens"]
            assert response["truncation"] == "auto" and used + room <= 256
            count = server.client().responses.input_tokens.count
            lengths = [count(**asked | {"input": asked["input"][n:]}).input_tokens for n in range(11)]
            assert used == max(length for length in lengths if length + room <= 256)
        by_default = ask(server, **asked, truncation="auto").json()
        assert 100 < by_default["usage"]["input_tokens"] <= 192 and by_default["usage"]["output_tokens"] <= 156
        long = [{"role": "user", "content": "a" * 300}]
        assert error_of(ask(server, input=long, truncation="auto"))["code"] == "context_length_exceeded"


def test_a_response_that_is_not_stored_or_has_another_key_is_not_found(byte_model):
    with live_server(byte_model, api_keys="alice:sk-a,bob:sk-b") as server:
        asked: Json = {"model": NAME, "input": "a", "max_output_tokens": 1}
        alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        kept = server.http.post("/v1/responses", json=asked, headers=alice).json()["id"]
        lost = server.http.post("/v1/responses", json=asked | {"store": False}, headers=alice).json()["id"]
        for headers, name, status in ((alice, kept, 200), (bob, kept, 400), (alice, lost, 400)):
            again = server.http.post("/v1/responses", json=asked | {"previous_response_id": name}, headers=headers)
            assert again.status_code == status
            assert status == 200 or error_of(again)["code"] == "previous_response_not_found"


def keep(kept: ResponseStore, owner: str, response_id: str, text: str = "a") -> None:
    kept.store(owner, [{"role": "user", "content": text}], {"id": response_id, "output": []})  # type: ignore[typeddict-item]


def test_the_largest_key_loses_its_oldest_response_first(monkeypatch):
    monkeypatch.setattr("server.routes.responses.MAX_STORED", 4)
    kept = ResponseStore()
    keep(kept, "alice", "0")
    for number in range(1000):
        keep(kept, "bob", str(number))
    assert kept.find("alice", "0")
    assert [bool(kept.find("bob", str(number))) for number in (996, 997, 998, 999)] == [False, True, True, True]
    monkeypatch.setattr("server.routes.responses.MAX_STORED_CHARACTERS", 1000)
    keep(kept, "alice", "1", "long" * 200)
    keep(kept, "bob", "1000")
    assert (kept.find("alice", "1"), kept.find("bob", "999") is None) == (None, False)
    assert sum(kept._sizes.values()) == sum(one.num_characters for own in kept._owned.values() for one in own.values())


def test_a_response_with_the_same_id_replaces_the_old_one():
    """Clients choose the id by `x-request-id`. A replaced response no longer counts towards the limits."""
    kept = ResponseStore()
    for number in range(50):
        keep(kept, "me", "1", f"{number}")
    found = kept.find("me", "1")
    assert found and json.loads(found.items)[0]["content"] == "49"
    assert kept._sizes["me"] == found.num_characters


def test_a_stored_response_can_be_read_and_deleted(server):
    client, asked = server.client(), {"max_output_tokens": 9, "metadata": {"run": "7"}}
    made = client.responses.create(model=NAME, input="Hello", **asked, extra_body={"ignore_eos": True})
    assert client.responses.retrieve(made.id) == made
    replayed = [*client.responses.retrieve(made.id, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in replayed]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert replayed[0].response.output == [] and replayed[-1].response == made  # type: ignore[union-attr]
    assert [*client.responses.retrieve(made.id, stream=True, starting_after=6)] == replayed[7:]
    for query in ({"include[]": "message.output_text.logprobs"}, {"starting_after": "1"}, {"stream": "maybe"}):
        refused = server.http.get(f"/v1/responses/{made.id}", params=query)
        assert (refused.status_code, error_of(refused)["param"]) == (400, *query)
    deleted = server.http.delete(f"/v1/responses/{made.id}")
    assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
    not_stored = ask(server, store=False, max_output_tokens=1).json()["id"]
    for gone in (made.id, not_stored):
        for answer in (server.http.get(f"/v1/responses/{gone}"), server.http.delete(f"/v1/responses/{gone}")):
            assert (answer.status_code, error_of(answer)["param"]) == (404, "response_id")


SPACE = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [TOOL]}
HOSTED = [{"type": kind} for kind in ("web_search", "local_shell", "mcp", "code_interpreter", "image_generation")]
CUSTOM = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}}


def test_hosted_tools_are_ignored_and_namespaces_are_flattened(server):
    with answering(server.app, CALL, CALL, CALL):
        response = ask(server, input="Weather?", tools=[HOSTED[0], SPACE, *HOSTED[1:], CUSTOM])
        brought = ask(server, input=[{"type": "additional_tools", "tools": [TOOL]}, {"role": "user", "content": "a"}])
        alone = ask(server, input="Weather?", tools=[TOOL])
    [call] = response.json()["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("get_weather", "sky", '{"city":"Bern"}')
    assert "namespace" not in brought.json()["output"][0]
    assert response.json()["usage"]["input_tokens"] == alone.json()["usage"]["input_tokens"]
    left_out = ["tools[0].web_search", *(f"tools[{n}].{tool['type']}" for n, tool in enumerate(HOSTED[1:], start=2))]
    assert response.headers["x-nvium-ignored-params"] == ", ".join([*left_out, "tools[6].custom"])


def test_items_of_hosted_tools_become_calls_and_text(server):
    items: list[Json] = [
        {"role": "user", "content": "Weather?"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "Bern"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": "a"},
        {"type": "mcp_call", "id": "c3", "name": "look", "arguments": "{}", "output": "b", "server_label": "s"},
        {"role": "user", "content": "So?"},
    ]
    prompt = (
        'User:\nWeather?\n\nAssistant:\n[web_search_call: {"query": "Bern"}]\n'
        '{"name": "patch", "arguments": {"input": "x"}}\n\nTool:\ndone\n\n'
        'Assistant:\n{"name": "local_shell", "arguments": {"command": ["ls"]}}\n\nTool:\na\n\n'
        'Assistant:\n{"name": "look", "arguments": {}}\n\nTool:\nb\n\nUser:\nSo?\n\nAssistant:\n'
    )
    assert ask(server, input=items, max_output_tokens=1).json()["usage"]["input_tokens"] == len(token_ids(prompt))


def test_text_format_constrains_the_response(server):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert json.loads(ask(server, text=form).json()["output"][0]["content"][0]["text"]) in ({"n": 1}, {"n": 2})


def test_ignored_fields_are_named_and_requests_are_counted(server):
    response = ask(server, max_output_tokens=1, reasoning={"effort": "low"}, include=["x"])
    assert response.headers["x-nvium-ignored-params"] == "reasoning.effort, include"
    assert server.gauge('nvium_requests_total{endpoint="responses",outcome="completed"}') >= 1


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("text", '{"verbosity": "\\ud83e"}'),
        ("tools", '[{"type": "hosted", "x": ["\\ud83e"]}]'),
        ("tool_choice", '{"type": "function", "name": "f", "\\ud83e": 1}'),
    ],
)
def test_a_field_that_the_response_repeats_must_be_unicode(server, param, value):
    body = f'{{"model": "default", "input": "a", "max_output_tokens": 1, "{param}": {value}}}'
    response = server.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert (error_of(response)["param"], "valid Unicode" in error_of(response)["message"]) == (param, True)
