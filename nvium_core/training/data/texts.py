"""Files of training text: documents, or conversations and plain texts, which become token ids for fine-tuning.

A file of documents is UTF-8 text, plain or .xz, with `<|endoftext|>` lines between documents. A line of a chat file is
a conversation (`messages` in OpenAI's format, text only) or a plain text. The tokenizer's chat template renders
prompts, as in the server. So training and serving use the same prompts.

Shapes: T tokens.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import DataError

END_OF_TEXT = "<|endoftext|>"

CHAT_SUFFIXES = (".jsonl", ".jsonl.xz")
ROLES = ("system", "user", "assistant")

Message = dict[str, str]
"""A message with `role` and `content`."""

Conversation = list[Message]

Line = Conversation | str  # a conversation or a plain text


def documents_of(path: Path) -> Iterator[str]:
    """Stream the non-empty documents of a file. Raise `DataError` if there are none or the file is damaged."""
    if path.name.endswith(CHAT_SUFFIXES):
        raise DataError(f"{path}: must be text, not .jsonl")
    is_empty, document = True, list[str]()
    for line in chain(lines_of(path), [END_OF_TEXT]):
        if line.rstrip("\n") != END_OF_TEXT:
            document.append(line)
            continue
        if text := "".join(document).strip("\n"):
            is_empty = False
            yield text
        document.clear()
    if is_empty:
        raise DataError(f"{path}: no documents")


def lines_of(path: Path) -> Iterator[str]:
    """Stream the lines of a file, plain or .xz. Raise `DataError` for a damaged file, or a line that is not UTF-8."""
    number = 0
    try:
        with cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: is not UTF-8 text ({error.reason})") from error
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


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


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids [T] of a conversation or a plain text. `is_answer` [T] marks the tokens that count in the loss.

    In a conversation, these tokens are the assistant's answers, each with its end-of-text. In a plain text, they are
    all tokens except begin-of-text. `is_continued`: the text begins in the example before.
    """

    tokens: NDArray[np.int64]
    is_answer: NDArray[np.bool_]
    is_continued: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


def prompt_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Render messages with the chat template, up to the start of the assistant's next answer, and tokenize them."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def example(line: Line, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Tokenize a plain text, from begin-of-text to end-of-text, or a conversation up to its last answer.

    Raise `DataError` if a text contains a special token, or if the chat template changes an answer when another message
    follows the answer.
    """
    if not isinstance(line, str):
        return conversation_example(line, tokenizer)
    check_plain([line], tokenizer)
    tokens = np.array([*tokenizer.encode(line, verbose=False), tokenizer.eos_token_id])
    is_answer = np.full(len(tokens), True)
    is_answer[0] = tokens[0] != tokenizer.bos_token_id
    return Example(tokens, is_answer)


def conversation_example(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Example:
    check_plain([message["content"] for message in conversation], tokenizer)
    tokens, is_answer = list[int](), list[bool]()
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = prompt_tokens(conversation[:index], tokenizer)
        if prompt[: len(tokens)] != tokens:
            raise DataError(
                "the chat template changes an answer when another message follows; "
                "split the conversation so that every line has only one answer"
            )
        text = tokenizer.encode(message["content"], add_special_tokens=False, verbose=False)
        answer = [*text, tokenizer.eos_token_id]
        is_answer += [False] * (len(prompt) - len(tokens)) + [True] * len(answer)
        tokens = prompt + answer
    return Example(np.array(tokens), np.array(is_answer))


def check_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `DataError` if a text contains a special token. The server would tokenize such a token as plain text."""
    for token in tokenizer.all_special_tokens:
        if any(token in text for text in texts):
            raise DataError(f"a text contains the special token {token}; remove it")
