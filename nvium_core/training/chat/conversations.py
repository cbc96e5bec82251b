"""Read chat files. A line is a conversation (`messages` in OpenAI's format, text only) or a plain text."""

import json
from pathlib import Path
from typing import Any

from nvium_core.training.data.corpus import lines_of
from nvium_core.training.errors import DataError

CHAT_SUFFIXES = (".jsonl", ".jsonl.xz")
ROLES = ("system", "user", "assistant")

Message = dict[str, str]
"""A message with `role` and `content`."""

Conversation = list[Message]

Line = Conversation | str  # a conversation or a plain text


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def holds_conversations(path: Path) -> bool:
    """Return True for a .jsonl or .jsonl.xz file whose first line has `messages`."""
    if not path.name.endswith(CHAT_SUFFIXES):
        return False
    try:
        return "messages" in json.loads(next(iter(lines_of(path)), ""))
    except (ValueError, TypeError):
        return False


def read_conversations(path: Path) -> dict[int, Line]:
    """Return the conversations and plain texts of a .jsonl or .jsonl.xz file, keyed by line number.

    Each line is empty or a JSON object, `{"messages": [{"role": …, "content": …}, …]}` or `{"text": …}`. Raise
    `DataError` naming the file and line if a line is invalid.
    """
    conversations = dict[int, Line]()
    for number, line in enumerate(lines_of(path), 1):
        try:
            if line.strip():
                conversations[number] = parse_line(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    if not conversations:
        raise DataError(f"{path}: no conversations")
    return conversations


def parse_line(value: Any) -> Line:
    """Validate a line's JSON value and strip its texts of whitespace. Raise `ValueError` if the value is invalid."""
    fields = value if isinstance(value, dict) else {}
    if "text" in fields and "messages" not in fields:
        return parse_text("text", fields["text"])
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise ValueError('expected {"messages": [...]} or {"text": "..."}')
    conversation = [parse_message(message) for message in messages]
    if not any(message["role"] == "assistant" for message in conversation):
        raise ValueError("no message has the role assistant")
    if conversation[0]["role"] == "assistant":
        raise ValueError("the first message must not have the role assistant")
    return conversation


def parse_message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if role not in ROLES:
        raise ValueError(f"a message's role must be one of {', '.join(ROLES)}, got {role!r}")
    return {"role": role, "content": parse_text("a message's content", content)}


def parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a non-empty string, got {value!r}")
    value.encode()  # raises ValueError if the text has lone surrogates
    return value.strip()
