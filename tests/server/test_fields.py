from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, shared_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params

from server.fields import document, fields
from server.schemas.body import RequestBody
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "fields.md"

OPENAI: list[tuple[type[RequestBody], str, Any]] = [
    (CompletionRequest, "", completion_create_params.CompletionCreateParamsNonStreaming),
    (ChatRequest, "", chat_create_params.CompletionCreateParamsStreaming),
    (ChatRequest, "stream_options.", ChatCompletionStreamOptionsParam),
    (ChatRequest, "messages[].", ChatCompletionAssistantMessageParam),
    (ChatRequest, "messages[].", ChatCompletionUserMessageParam),
    (ChatRequest, "messages[].", ChatCompletionToolMessageParam),
    (ChatRequest, "messages[].content[].", ChatCompletionContentPartTextParam),
    (ChatRequest, "tools[].", ChatCompletionFunctionToolParam),
    (ChatRequest, "tools[].function.", shared_params.FunctionDefinition),
    (ChatRequest, "response_format.", shared_params.ResponseFormatJSONSchema),
    (ChatRequest, "response_format.json_schema.", shared_params.response_format_json_schema.JSONSchema),
]


@pytest.mark.parametrize(("body", "within", "theirs"), OPENAI)
def test_every_field_of_the_official_client_is_known(body: type[RequestBody], within: str, theirs: Any) -> None:
    names = {f"{within}{name}" for name in get_type_hints(theirs)}
    assert names
    assert names - {name for name, _ in fields(body)} == set()


def test_a_field_that_is_missing_would_be_found() -> None:
    assert "messages" not in {name for name, _ in fields(CompletionRequest)}


def test_the_table_in_the_documentation_is_current() -> None:
    assert DOCUMENT.read_text() == document()


def test_the_table_tells_what_becomes_of_a_field() -> None:
    rows = {line.split("|")[1].strip(): line for line in document().splitlines() if line.startswith("| `")}
    assert "| honoured |" in rows["`top_k`"]
    assert "| refused |" in rows["`audio`"]
    assert '| neutral only: `"auto"`, `"default"` |' in rows["`service_tier`"]
