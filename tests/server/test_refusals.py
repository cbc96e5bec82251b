"""Invalid requests are refused with OpenAI's error format and the name of the field."""

import json
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import Answer

INVALID: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": None}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": [300]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 4000, "n": 100}),
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 10**30}),
    ("seed", {"seed": 2**63}),
    ("n", {"n": 0}),
    ("n", {"n": 100, "prompt": ["a"] * 100}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": list("abcde")}),
    ("stop", {"stop": 5}),
    ("stop_token_ids", {"stop_token_ids": [257]}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": "x"}}),
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("logprobs", {"logprobs": 21}),
    ("best_of", {"best_of": 1, "n": 2}),
    ("best_of", {"best_of": 129}),
    ("best_of", {"best_of": 3, "stream": True}),
    ("suffix", {"suffix": "end"}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"257": 1}}),
    ("logit_bias", {"logit_bias": {"fox": 1}}),
    ("min_p", {"min_p": 1.1}),
    ("min_tokens", {"min_tokens": 17}),
    ("nvium.sampling", {"nvium": {"sampling": "greedy"}}),
    ("nvium", {"nvium": 3}),
]


def error_of(response: httpx.Response | Answer) -> dict[str, Any]:
    """Return the error in a body, and check that it has exactly OpenAI's format."""
    body: dict[str, dict[str, Any]] = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_an_invalid_field_is_refused_with_its_name(server: LiveServer, param: str, fields: dict[str, Any]) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "body",
    ["", "{", "[1]", "null", "{'a': 1}", "\udcff", '{"a": ' + "[" * 100_000, '{"n": ' + "9" * 5000 + "}", "\x00"],
)
def test_a_body_that_is_not_a_json_object_is_refused(server: LiveServer, body: str) -> None:
    content = body.encode(errors="surrogateescape")
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("field", ["prompt", "stop", "model", "\ud800", "user"])
def test_a_lone_surrogate_is_not_an_internal_error(server: LiveServer, field: str) -> None:
    content = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1, field: "\ud800"})
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404)


def test_too_many_content_parts_are_refused(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}] * 2100
    messages = [{"role": "user", "content": parts}] * 2
    error = error_of(server.chat(messages=messages))
    assert (error["param"], "at most 4096 content parts" in error["message"]) == ("messages", True)


def test_another_content_type_is_refused(server: LiveServer) -> None:
    content = json.dumps({"model": NAME, "prompt": "a"})
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "text/xml"})
    assert "application/json" in error_of(response)["message"]


def test_an_exceeded_context_is_refused_with_its_numbers(server: LiveServer) -> None:
    error = error_of(server.complete(max_tokens=4095))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("4096", "4095", "4 ", "4099"))
    assert error_of(server.complete(prompt="a" * 5000))["param"] == "prompt"
    for fields in ({"max_tokens": 4095}, {"max_tokens": 999_999}, {"prompt": "a" * 5000}, {"prompt": "a" * 500_000}):
        error = error_of(server.complete(**fields))
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")
        assert "characters" not in error["message"]


def test_a_strict_client_raises_the_right_errors(server: LiveServer) -> None:
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
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other/name", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_unknown_routes_and_methods_have_the_same_error_format(
    server: LiveServer, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    error_of(response)


def test_an_internal_error_reveals_nothing(byte_model: LoadedModel) -> None:
    def add_failing_route(app: FastAPI) -> None:
        @app.get("/fail")
        async def fail() -> None:
            raise RuntimeError("secret in /etc/somewhere")

    with live_server(byte_model, add_failing_route) as server:
        response = server.http.get("/fail")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"model":"bytes","prompt":"\xff"}', "is not valid UTF-8: invalid start byte at byte 27", None),
        (b'{"model":"bytes","prompt":"\xed\xa0\x80"}', "is not valid UTF-8", None),
        (b'{"model":"bytes","prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "is nested too deeply", None),
        (b'{"model":"bytes","prompt":"a","prompt":"b"}', "has a duplicate key 'prompt'", "prompt"),
        (
            b'{"model":"bytes","prompt":"a","nvium":{"sampling":"exits","sampling":"mixture"}}',
            "has a duplicate key 'sampling'",
            "sampling",
        ),
        (b'{"model":"bytes","prompt":', "is not valid JSON: Expecting value at character 26", None),
    ],
)
def test_invalid_json_is_refused_with_the_reason(
    server: LiveServer, body: bytes, message: str, param: str | None
) -> None:
    response = server.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"the body {message}")
    assert response.json()["error"]["param"] == param
