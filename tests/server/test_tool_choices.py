"""Every tool choice goes with every output format, on both endpoints, streamed or not."""

from typing import Any

import pytest

from tests.byte_model import NAME
from tests.server.raw_client import Json
from tests.server.test_tools import NAMED, TOOLS

CHOICES: list[Any] = [None, "none", "auto", "required", NAMED]
ALLOWED = [{"mode": mode, "tools": [NAMED]} for mode in ("auto", "required")]
CHOICES += [{"type": "allowed_tools", "allowed_tools": allowed} for allowed in ALLOWED]
FORCED = (CHOICES[3], CHOICES[4], CHOICES[6])
FORMATS: list[Any] = [{"type": "text"}, {"type": "json_object"}]
FORMATS += [{"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}]


def of_responses(choice: Any) -> Any:
    """Return a tool choice in the form of `/v1/responses`."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return {"type": "function", **choice["function"]}
    return {"type": "allowed_tools", **choice["allowed_tools"], "tools": [of_responses(NAMED)]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_tools_goes_with_every_format(server, choice, stream):
    for output in FORMATS:
        asked: Json = {"tools": TOOLS, "tool_choice": choice, "stream": stream, "max_tokens": 60}
        chat = server.chat(response_format=output, **asked)
        assert chat.status_code == 200, chat.text
        if not stream:
            message = chat.json()["choices"][0]["message"]
            assert bool(message.get("tool_calls")) or choice not in FORCED, message
        tools = [{"type": "function", **each["function"]} for each in TOOLS]
        shown = {"type": output["type"], **output.get("json_schema", {})}
        body = {"model": NAME, "input": "a", "seed": 1, "tools": tools, "stream": stream, "max_output_tokens": 60}
        body |= {"text": {"format": shown}, "tool_choice": of_responses(choice)}
        answer = server.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            kinds = {item["type"] for item in answer.json()["output"]}
            assert kinds == {"function_call"} or choice not in FORCED
            assert answer.json()["text"]["format"].keys() == shown.keys() | ({"strict"} if len(shown) > 1 else set())
