"""Invalid requests are refused with OpenAI's error format and the name of the field."""

import json
from typing import Any

import openai
import pytest

from tests.byte_model import NAME
from tests.server.raw_client import JSON, Json, error_of
from tests.server.routes.test_responses import TOOL
from tests.server.structured_outputs.test_structured_outputs import response_format
from tests.server.test_tools import NAMED, TOOLS, tool

FUNCTION = "messages[1].tool_calls[0].function"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def say(**message: Any) -> Json:
    return {"messages": [{"role": "user", "content": "a"}, message]}


FORMS: list[tuple[str, Json]] = [
    ("response_format", {"response_format": "json"}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema", {"response_format": response_format({}) | {"type": "text"}}),
    ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    ("response_format.json_schema.name", {"response_format": response_format({}, name="a b")}),
    ("response_format.json_schema.schema", {"response_format": response_format([])}),
    ("response_format.json_schema.schema", {"response_format": response_format({"type": "thing"})}),
    ("response_format.json_schema.strict", {"response_format": response_format({}, strict="yes")}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(a"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.choice[0]", {"structured_outputs": {"choice": [1]}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "[]"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "[" * 100_000}}),
    ("min_tokens", {"structured_outputs": {"regex": "a"}, "min_tokens": 2, "max_tokens": 3}),
]
INVALID: dict[str, list[tuple[str, Json]]] = {
    "/v1/completions": [
        ("model", {"model": None}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": [True]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": ["a", ""]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "5"}),
        ("max_tokens", {"max_tokens": 4000, "n": 100}),
        ("top_k", {"top_k": -2}),
        ("n", {"n": 0}),
        ("n", {"n": 100, "prompt": ["a"] * 100}),
        *(("stop", {"stop": wrong}) for wrong in ("", list("abcde"), "a" * 10_001)),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
        ("logprobs", {"logprobs": 21}),
        ("best_of", {"best_of": 3, "stream": True}),
        ("nvium.sampling", {"nvium": {"sampling": "greedy"}}),
        ("nvium.sampling", {"nvium": {"sampling": "confidence", "threshold": 0.5}}),
        ("nvium.threshold", {"nvium": {"sampling": "threshold"}}),
        ("nvium.threshold", {"nvium": {"sampling": "threshold", "threshold": None}}),
        ("nvium.metdata", {"nvium": {"metdata": False}}),
        ("response_format.pattern", {"response_format": {"type": "json_object", "pattern": "a"}}),
        ("response_format.schema", {"response_format": {"type": "text", "schema": {}}}),
        ("response_format.type", {"response_format": {"type": "structural_tag", "structures": []}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"regex": "a", "structural_tag": "x"}}),
        ("stop_words", {"stop_words": ["a"]}),
        ("cache_salt", {"cache_salt": ""}),
        ("thinking_budget", {"thinking_budget": 5}),
        ("guided_other", {"guided_other": "a"}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= ((("}}),
        ("metadata.a", {"metadata": {"a": 1}}),
        *FORMS,
    ],
    "/v1/chat/completions": [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "a"}] * 4097}),
        ("messages[0]", {"messages": ["Hello"]}),
        ("messages[1].role", say(role="function", name="f", content="a")),
        ("messages[1].role", say(content="a")),
        ("messages[1].content", say(role="user")),
        ("messages[1].prefix", say(role="assistant", content="a", prefix=True)),
        ("messages[1].partial", say(role="assistant", content="a", partial=True)),
        ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "{% for a in range(9) %}"}}),
        ("continue_final_message", say(role="assistant", tool_calls=[CALL]) | {"continue_final_message": True}),
        ("metadata", {"metadata": {"a" * 65: "b"}}),
        ("metadata", {"metadata": {str(n): "b" for n in range(17)}}),
        ("messages[1].content[0].type", say(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])),
        ("messages[1].content[0].text", say(role="user", content=[{"type": "text"}])),
        ("messages[1].name", say(role="user", content="a", name="a b")),
        ("messages[1].audio", say(role="assistant", content="a", audio={"id": "x"})),
        ("messages[1].function_call", say(role="assistant", content="a", function_call={"name": "f", "arguments": ""})),
        ("messages[1].refusal", say(role="user", content="a", refusal="no")),
        ("messages[1].tool_call_id", say(role="tool", content="a")),
        ("messages[1].tool_call_id", say(role="tool", content="a", tool_call_id="1")),
        ("messages[1].tool_call_id", say(role="user", content="a", tool_call_id="1")),
        ("messages[1].tool_calls", say(role="user", content="a", tool_calls=[CALL])),
        ("messages[1].tool_calls[0].type", say(role="assistant", tool_calls=[CALL | {"type": "custom"}])),
        (f"{FUNCTION}.arguments", say(role="assistant", tool_calls=[CALL | {"function": {"name": "f"}}])),
        ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("thinking_budget", {"thinking_budget": 5}),
        ("thinking_budget", {"thinking_budget": -2}),
        ("thinking_budget", {"thinking_budget": 5, "reasoning": {"max_tokens": 6}}),
        ("reasoning.max_tokens", {"reasoning": {"max_tokens": 5}}),
        ("reasoning_effort", {"reasoning_effort": "some"}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": NAMED}),
        ("structured_outputs.regex", {"tools": TOOLS, "structured_outputs": {"regex": "a"}}),
        ("tools", {"tools": [tool("f"), tool("f", description="g")]}),
        ("tools", {"tools": [tool("f")] * 129, "tool_choice": "none"}),
        ("tools", {"tools": [tool("f", parameters={"type": "array"})], "tool_choice": "required"}),
        ("tools", {"tools": [tool("f", parameters={"properties": 5}, strict=True)], "tool_choice": "required"}),
        ("tools[0].type", {"tools": [{"type": "computer", "computer": {}}]}),
        ("tools[0].function.name", {"tools": [tool("a b")]}),
    ],
    "/v1/responses": [
        ("logit_bias", {"logit_bias": {"1": 2}}),
        ("n", {"n": 2}),
        ("include", {"include": "message.output_text.logprobs"}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}),
        ("truncation", {"truncation": "back"}),
        ("background", {"background": True}),
        ("reasoning.max_tokens", {"reasoning": {"max_tokens": 5}}),
        ("thinking_budget", {"thinking_budget": 5}),
        *(("input", {"input": wrong}) for wrong in (None, [])),
        ("input[0].role", {"input": [{"role": "tool", "content": "a"}]}),
        ("input[1].type", {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]}),
        *(("input[0].type", {"input": [{"type": wrong}]}) for wrong in ("computer_call", "compaction")),
        ("input[0].tools", {"input": [{"type": "additional_tools", "tools": [{"name": "f"}]}]}),
        ("metadata", {"metadata": {"a" * 65: "b"}}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("nvium.x", {"nvium": {"x": 1}}),
        ("previous_response_id", {"previous_response_id": "resp_x"}),
    ],
    "/tokenize": [
        ("prompt", {}),
        ("prompt", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("prompt", {"prompt": ["a"]}),
        ("tools", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("add_special_tokens", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
        ("add_special_tokens", {"prompt": "a", "add_special_tokens": 1}),
    ],
    "/detokenize": [("tokens", {}), *(("tokens", {"tokens": wrong}) for wrong in ([257], [10**30], [True], 5))],
}
"""For each path, the parameter that an error names, and the invalid fields."""

VALID: dict[str, Json] = {
    "/v1/completions": {"model": NAME, "prompt": "Once"},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"model": NAME, "input": "Hello"},
    "/tokenize": {},
    "/detokenize": {},
}


@pytest.mark.parametrize(("path", "param", "fields"), [(path, *row) for path, rows in INVALID.items() for row in rows])
def test_an_invalid_field_is_refused_with_its_name(server, path, param, fields):
    response = server.http.post(path, json=VALID[path] | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert ("is missing" in error["message"]) == (error["code"] == "missing_required_parameter")
    assert "should" not in error["message"]  # pydantic's wording


@pytest.mark.parametrize(
    ("path", "body", "param", "unknown"),
    [
        ("/v1/completions", {"model": NAME, "promt": "Once"}, "prompt", "promt"),
        ("/v1/completions", {"promt": "Once"}, "prompt", "promt"),
        ("/v1/completions", {"model": NAME, "promt": "Once", **dict.fromkeys(map(str, range(100)), 1)}, "prompt", None),
        ("/v1/chat/completions", {"model": NAME, "mesages": []}, "messages", "mesages"),
        ("/tokenize", {"messages": [{"role": "user", "contents": "a"}]}, "messages[0].content", "contents"),
        ("/v1/responses", {"model": NAME, "inputs": "Hello"}, "input", "inputs"),
        ("/v1/completions", {"model": NAME, "text": "Once", "promp" * 9: 1}, "prompt", None),
    ],
)
def test_a_missing_field_is_named_with_the_unknown_one_that_looks_like_it(server, path, body, param, unknown):
    error = error_of(server.http.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "missing_required_parameter")
    assert error["message"] == f"{param}: is missing" + (f"; `{unknown}` is unknown" if unknown else "")


@pytest.mark.parametrize("field", ["prompt", "stop", "model", "\ud800", "user"])
def test_a_lone_surrogate_is_not_an_internal_error(server, field):
    content = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1, field: "\ud800"})
    response = server.http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code in (200, 400, 404)


def test_too_many_content_parts_are_refused(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2100}] * 2
    error = error_of(server.chat(messages=messages))
    assert (error["param"], "at most 4096 content parts" in error["message"]) == ("messages", True)


@pytest.mark.parametrize("kind", ["text/xml", "text/plain", "multipart/form-data; boundary=a", "application/xjson"])
def test_another_content_type_is_refused(server, kind):
    content = json.dumps({"model": NAME, "prompt": "a"})
    response = server.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_body")
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("missing_required_parameter", {"prompt": None}),
        ("invalid_type", {"max_tokens": "5"}),
        ("invalid_type", {"stop": 5}),
        ("out_of_range", {"max_tokens": 10**30}),
        ("out_of_range", {"best_of": 129}),
        ("out_of_range", {"stop_token_ids": [1] * 1_025}),
        ("invalid_value", {"nvium": {"sampling": "greedy"}}),
        ("unknown_parameter", {"nvium": {"metdata": False}}),
        ("unsupported_parameter", {"suffix": "a"}),
    ],
)
def test_the_code_of_a_validation_error_is_its_kind(server, code, body):
    assert error_of(server.complete(**body))["code"] == code


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 2, "must be 1 or null"),
        ("max_tokens", 5, "use `max_output_tokens`; must be null"),
        ("response_format", {"type": "json_object"}, "use `text.format`; must be null"),
    ],
)
def test_a_field_of_chats_is_refused_in_responses_with_what_to_use(server, field, value, message):
    refused = server.http.post("/v1/responses", json=VALID["/v1/responses"] | {field: value})
    assert error_of(refused)["message"].endswith(message)


def test_an_exceeded_context_is_refused_with_its_numbers(server):
    error = error_of(server.complete(max_tokens=4095))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("4096", "4095", "4 ", "4099"))
    for fields in ({"max_tokens": 4095}, {"max_tokens": 999_999}, {"prompt": "a" * 5000}, {"prompt": "a" * 500_000}):
        error = error_of(server.complete(**fields))
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")
        assert "characters" not in error["message"]


def test_a_strict_client_raises_the_right_errors(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-x", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="a", stream=True, temperature=3)
    assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/assets/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/other/name", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/responses/resp_a", 405),
        ("POST", "/v1/responses/compact", 404),
        ("GET", "/v1/responses/compact", 404),
    ],
)
def test_unknown_routes_and_methods_have_the_same_error_format(server, method, path, status):
    response = server.http.request(method, path)
    assert response.status_code == status
    error = error_of(response)
    assert (status, error["code"]) != (404, None) or "GET /openapi.json lists" in error["message"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "the body must be a JSON object", None),
        (b"[1]", "the body must be a JSON object", None),
        (b"null", "the body must be a JSON object", None),
        (b"{'a': 1}", "the body is not valid JSON: Expecting property name", None),
        (b'{"model":"bytes","prompt":', "the body is not valid JSON: Expecting value at character 26", None),
        (b"\x00", "the body is not valid JSON", None),
        (b'{"n": ' + b"9" * 5000 + b"}", "the body has an integer of too many digits", None),
        (b'{"a": ' + b"[" * 100_000, "the body has more than 50,000 lists", None),
        (b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "the body is nested too deeply", None),
        (b'{"model":"bytes","prompt":"\xff"}', "the body is not valid UTF-8: invalid start byte at byte 27", None),
        (b'{"model":"bytes","prompt":"\xed\xa0\x80"}', "the body is not valid UTF-8", None),
        (b'{"model":"bytes","prompt":"a","prompt":"b"}', "the body has a duplicate key 'prompt'", "prompt"),
        (b'{"nvium":{"sampling":1,"sampling":1}}', "the body has a duplicate key 'sampling'", "sampling"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused_with_the_reason(server, body, message, param):
    response = server.http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["message"].startswith(message), error["param"]) == (True, param)


def test_every_wrong_key_of_logit_bias_is_named(server):
    refused = server.complete(logit_bias={"a": 1, "5": 1, "05": 1, "257": 1})
    assert error_of(refused)["message"] == "logit_bias: must be token ids in [0, 257), got 'a', '05', 257"
