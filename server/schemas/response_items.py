"""Converts input items of `/v1/responses` to chat messages."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from server.errors import InvalidField
from server.schemas.body import require

Json = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")

PARTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")

MORE_TOOLS = "additional_tools"

ARGUMENTS: dict[str, Callable[[Json], tuple[Any, Any]]] = {
    "function_call": lambda item: (item.get("name"), item.get("arguments")),
    "custom_tool_call": lambda item: (item.get("name"), json.dumps({"input": item.get("input")})),
    "local_shell_call": lambda item: ("local_shell", json.dumps(item.get("action"))),
    "mcp_call": lambda item: (item.get("name"), item.get("arguments")),
}
"""For each type of item that is a call, a function that returns the call's name and arguments."""

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")

TEXT_ITEMS = {
    "web_search_call": "action",
    "file_search_call": "queries",
    "code_interpreter_call": "code",
    "mcp_list_tools": "server_label",
}
"""Items about hosted tools, which become text. Maps an item's type to the field that the text quotes."""

PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
"""Prefixes of the ids of items, by type."""


def new_id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'item')}_{uuid4().hex}"


def listed(item: Mapping[str, Any]) -> Json:
    """Return an input item with an id, a status, and text as a list of parts."""
    kind = item.get("type", "message")
    given = {name: value for name, value in item.items() if value is not None}
    made = {"id": new_id(kind), "type": kind, "status": "completed", **given}
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_output = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        made["content"] = [{**part, "text": text}]
    return made


def messages_of(items: Sequence[Json]) -> list[Json]:
    """Convert items to chat messages. Raise `InvalidField` for an unsupported item.

    A call becomes a part of the last message if that is the assistant's.
    """
    messages: list[Json] = []
    for number, item in enumerate(items):
        kind = str(item.get("type", "message"))
        if kind == MORE_TOOLS:
            continue
        if kind in ARGUMENTS:
            add_call(messages, item, *ARGUMENTS[kind](item))
            if item.get("output") is None:
                continue
            kind = OUTPUTS[0]
        message = message_of(item, kind, f"input[{number}]")
        last = messages[-1] if messages else {}
        has_only_reasoned = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
        if kind == "message" and message["role"] == "assistant" and has_only_reasoned:
            last |= message
        elif message:
            messages.append(message)
    return messages


def message_of(item: Mapping[str, Any], kind: str, param: str) -> Json:
    """Return the chat message of an item that is not a call. For reasoning without text, return an empty object."""
    if kind == "message":
        require(item.get("role") in ROLES, f"{param}.role", f"must be one of {', '.join(ROLES)}")
        return {"role": item["role"], "content": content(item.get("content"), f"{param}.content")}
    if kind in OUTPUTS:
        output = content(item.get("output"), f"{param}.output")
        return {"role": "tool", "content": output, "tool_call_id": item.get("call_id") or item.get("id")}
    if kind in TEXT_ITEMS:
        return {"role": "assistant", "content": f"[{kind}: {json.dumps(item.get(TEXT_ITEMS[kind]))}]"}
    if kind == "reasoning":
        text = content(item.get("content"), f"{param}.content")
        return {"role": "assistant", "content": "", "reasoning_content": text} if text else {}
    supported = ", ".join(("message", "reasoning", *ARGUMENTS, *OUTPUTS, *TEXT_ITEMS, MORE_TOOLS))
    raise InvalidField(f"{param}.type", f"{kind[:100]!r} is not supported; must be one of {supported}")


def add_call(messages: list[Json], item: Mapping[str, Any], name: Any, arguments: Any) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call_id = item.get("call_id") or item.get("id")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def content(parts: Any, param: str) -> str | None:
    """Join text parts with newlines. Raise `InvalidField` for parts other than text."""
    if parts is None or isinstance(parts, str):
        return parts
    require(isinstance(parts, list), param, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        require(
            kind in PARTS,
            f"{param}[{number}].type",
            f"{str(kind)[:100]!r} is not supported; must be text, because images, audio and files are not",
        )
        text = part.get("refusal" if kind == "refusal" else "text")
        require(isinstance(text, str), f"{param}[{number}].text", "must be a string")
        texts.append(text)
    return "\n".join(texts)
