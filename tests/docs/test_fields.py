import re
from typing import Any, get_type_hints

import pytest
from openai.types import chat, completion_create_params, shared_params

from docs.tables.fields import fields
from server.errors import CODES, CONTEXT_EXCEEDED, INVALID, REJECTIONS, TOO_COSTLY, UNSUPPORTED
from server.schemas.body import RequestBody
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import ExitSummary, TokenExits
from tests.docs.pages import ROOT

OPENAI: list[tuple[type[RequestBody], str, Any]] = [
    (CompletionRequest, "", completion_create_params.CompletionCreateParamsNonStreaming),
    (ChatRequest, "", chat.completion_create_params.CompletionCreateParamsStreaming),
    (ChatRequest, "stream_options.", chat.ChatCompletionStreamOptionsParam),
    (ChatRequest, "messages[].", chat.ChatCompletionAssistantMessageParam),
    (ChatRequest, "messages[].", chat.ChatCompletionUserMessageParam),
    (ChatRequest, "messages[].", chat.ChatCompletionToolMessageParam),
    (ChatRequest, "messages[].content[].", chat.ChatCompletionContentPartTextParam),
    (ChatRequest, "tools[].", chat.ChatCompletionFunctionToolParam),
    (ChatRequest, "tools[].function.", shared_params.FunctionDefinition),
    (ChatRequest, "response_format.", shared_params.ResponseFormatJSONSchema),
    (ChatRequest, "response_format.json_schema.", shared_params.response_format_json_schema.JSONSchema),
]


@pytest.mark.parametrize(("body", "within", "theirs"), OPENAI)
def test_every_field_of_the_official_client_is_known(body, within, theirs):
    names = {f"{within}{name}" for name in get_type_hints(theirs)}
    assert names
    assert names - {name for name, _ in fields(body)} == set()


def test_the_page_lists_the_response_extensions():
    added = {**TokenExits.__annotations__, **ExitSummary.__annotations__}
    assert first_cells("## Response extensions") - {"metadata"} == set(added)


def test_the_page_has_every_error_code_and_no_other():
    sources = "".join(file.read_text() for file in (ROOT / "server").rglob("*.py"))
    codes = {*re.findall(r'\bcode ?= ?"(\w+)"', sources), *REJECTIONS, *CODES.values(), INVALID}
    codes |= {CONTEXT_EXCEEDED, TOO_COSTLY, UNSUPPORTED, "unknown_url", "method_not_allowed"}
    assert first_cells("## Errors") == codes


def first_cells(heading: str) -> set[str]:
    """Return the names in the first column of a section's tables."""
    section = (ROOT / "docs/fields.md").read_text(encoding="utf-8").partition(f"{heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
