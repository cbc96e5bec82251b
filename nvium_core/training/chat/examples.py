"""Conversations as tokens to tune on; only the assistant's count in the loss. Plain texts count whole.

Prompts are tokenized as in the server, by the tokenizer's chat template, so training and serving match exactly.

Shapes: T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import Conversation, Line, Message
from nvium_core.training.data.documents import DataError


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation's tokens [T], and which of them are the assistant's [T]: its answers and the end-of-text after
    each. Of a plain text, all but a begin-of-text are."""

    tokens: NDArray[np.int64]
    is_answer: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> "Example":
        """The first `num_tokens` tokens."""
        return Example(self.tokens[:length], self.is_answer[:length])


def prompt_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt of the assistant's turn."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def example(line: Line, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Raises `DataError` as `conversation_example` does."""
    return text_example(line, tokenizer) if isinstance(line, str) else conversation_example(line, tokenizer)


def text_example(text: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The tokens of a text as a prompt, and its end."""
    check_plain([text], tokenizer)
    tokens = np.array([*tokenizer.encode(text, verbose=False), tokenizer.eos_token_id])
    is_answer = np.full(len(tokens), True)
    is_answer[0] = tokens[0] != tokenizer.bos_token_id
    return Example(tokens, is_answer)


def conversation_example(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The tokens of a conversation up to its last answer.

    Raises `DataError` if a message holds a special token, or if the chat template changes an answer once another
    message follows it.
    """
    check_plain([message["content"] for message in conversation], tokenizer)
    tokens, is_answer = list[int](), list[bool]()
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = prompt_tokens(conversation[:index], tokenizer)
        if prompt[: len(tokens)] != tokens:
            raise DataError("the chat template changes an answer when another message follows; give each its own line")
        answer = answer_tokens(message["content"], tokenizer)
        is_answer += [False] * (len(prompt) - len(tokens)) + [True] * len(answer)
        tokens = prompt + answer
    return Example(np.array(tokens), np.array(is_answer))


def answer_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """An answer and the end of the turn."""
    return [*tokenizer.encode(text, add_special_tokens=False, verbose=False), tokenizer.eos_token_id]


def check_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse special tokens in texts; the server reads those as text."""
    for token in tokenizer.all_special_tokens:
        if any(token in text for text in texts):
            raise DataError(f"a text holds the special token {token}")


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write an .npz file atomically."""
    partial = path.with_name(f"partial-{path.name}")
    np.savez(
        partial,
        tokens=np.concatenate([example.tokens for example in examples]),
        is_answer=np.concatenate([example.is_answer for example in examples]),
        lengths=[len(example) for example in examples],
    )
    partial.replace(path)


def load_examples(path: Path) -> list[Example]:
    """Raises `DataError` naming a damaged file."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            ends = arrays["lengths"].cumsum()[:-1]
            parts = (np.split(arrays[name], ends) for name in ("tokens", "is_answer"))
            return [Example(*example) for example in zip(*parts, strict=True)]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: damaged ({error!r})") from error
