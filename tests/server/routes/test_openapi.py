from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from pydantic import TypeAdapter

from server.routes.openapi import document
from server.schemas.chat import ChatChunk
from server.schemas.completions import Completion
from tests.byte_model import NAME
from tests.server.live_server import LiveServer
from tests.server.raw_client import Json, events_of

DOCUMENT = document()


def check(schema: Json, instance: Any) -> None:
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(instance)


def check_answer(server: LiveServer, method: str, path: str, body: Json | None, template: str | None = None) -> None:
    """Check that the response's status and content type are declared, and that its body matches their schema."""
    response = server.http.request(method, path, json=body)
    answers = DOCUMENT["paths"][template or path][method.lower()]["responses"]
    content_type = response.headers["content-type"].partition(";")[0]
    status = "200" if response.is_success else f"{response.status_code // 100}XX"
    schema = answers[status]["content"][content_type]["schema"]
    if content_type == "application/json":
        check(schema, response.json())


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, "return_token_ids": True, "n": 2}),
        ("/v1/completions", {"prompt": "a", "nvium": {"metadata": False}}),
        ("/v1/completions", {"prompt": "a", "n": 0}),
        ("/v1/completions", {"prompt": "a", "model": "x"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [5]}),
        ("/detokenize", {"tokens": [500]}),
    ],
)
def test_responses_match_their_schemas(server, path, body):
    limit = {"max_tokens": 3} if path.startswith("/v1") else {}
    check_answer(server, "POST", path, {"model": NAME, **limit, **body})


def test_responses_to_get_match_their_schemas(server):
    for path, methods in DOCUMENT["paths"].items():
        if "get" in methods and "{" not in path:
            check_answer(server, "GET", path, None)
    for name in (NAME, "x"):
        check_answer(server, "GET", f"/v1/models/{name}", None, "/v1/models/{model_id}")


def test_chunks_match_their_schemas(server):
    options = {"stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}, "return_token_ids": True}
    for response, kind in (
        (server.complete(**options, logprobs=1), Completion),
        (server.chat(**options, logprobs=True, top_logprobs=1), ChatChunk),
    ):
        for chunk in events_of(response.text):
            check({"$ref": f"#/components/schemas/{kind.__name__}"}, chunk)
            known = TypeAdapter(kind)
            is_declared = known.dump_python(known.validate_python(chunk), mode="json") == chunk
            assert is_declared, "a field that is not declared"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({}, True),
        ({"n": None, "stop": None, "stream_options": None, "nvium": None, "store": None, "more": 1}, True),
        ({"store": False, "service_tier": "auto", "audio": None}, True),
        ({"n": "1"}, False),
        ({"store": True}, False),
        ({"store": 0}, False),
        ({"audio": {}}, False),
        ({"messages": None}, False),
        ({"stream_options": {"include_usage": 1}, "stream": True}, False),
        ({"tool_choice": "maybe"}, False),
    ],
)
def test_requests_are_accepted_if_and_only_if_they_match_the_schema(server, body, fits):
    schema = {"$ref": "#/components/schemas/ChatRequest"}
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 1, **body}
    assert server.http.post("/v1/chat/completions", json=asked).status_code == (200 if fits else 400)
    if fits:
        check(schema, asked)
    else:
        with pytest.raises(ValidationError):
            check(schema, asked)
