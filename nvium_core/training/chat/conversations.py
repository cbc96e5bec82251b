"""Reads conversations, OpenAI's `messages` with text only, and plain texts from chat files. Knows no tokens."""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from nvium_core.training.data.documents import DataError

CHAT_SUFFIXES = (".jsonl", ".jsonl.xz")
ROLES = ("system", "user", "assistant")

Message = dict[str, str]
"""`role` and `content`."""

Conversation = list[Message]

Line = Conversation | str
"""A conversation, or a plain text."""


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def holds_conversations(path: Path) -> bool:
    """Whether the first line of a file has `messages`."""
    if not path.name.endswith(CHAT_SUFFIXES):
        return False
    try:
        with opened(path) as file:
            return "messages" in json.loads(file.readline())
    except (OSError, ValueError, TypeError, lzma.LZMAError, EOFError):
        return False


def opened(path: Path) -> IO[str]:
    return (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig")


def read_conversations(path: Path) -> dict[int, Line]:
    """Read the conversations and plain texts of a file, plain or .xz, by line number.

    A line is a JSON object, `{"messages": [{"role": …, "content": …}, …]}` or `{"text": …}`, or empty. Raises
    `DataError` naming the file and line.
    """
    try:
        with opened(path) as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: {error}") from error
    conversations = dict(_parsed_lines(path, lines))
    if not conversations:
        raise DataError(f"{path}: no conversations")
    return conversations


def _parsed_lines(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, Line]]:
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, parse_line(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error


def parse_line(value: Any) -> Line:
    if isinstance(value, dict) and "text" in value and "messages" not in value:
        return parse_text("text", value["text"])
    return parse_conversation(value)


def parse_conversation(value: Any) -> Conversation:
    """The messages of a parsed line, texts stripped. Raises `ValueError` saying what is wrong."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        raise ValueError('expected {"messages": [...]} or {"text": "..."}')
    conversation = [parse_message(message) for message in messages]
    if not any(message["role"] == "assistant" for message in conversation):
        raise ValueError("nothing is said by the assistant")
    if conversation[0]["role"] == "assistant":
        raise ValueError("the assistant must not speak first")
    return conversation


def parse_message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if role not in ROLES:
        raise ValueError(f"a message's role must be one of {', '.join(ROLES)}, got {role!r}")
    return {"role": role, "content": parse_text("a message's content", content)}


def parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, got {value!r}")
    value.encode()  # half a surrogate pair is an error
    return value.strip()
