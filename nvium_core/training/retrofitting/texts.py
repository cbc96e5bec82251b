"""Training and held-out text of a retrofit. In documents all tokens count, in conversations only the answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from nvium_core.training.data.conversations import Example, holds_conversations
from nvium_core.training.data.corpus import documents_of
from nvium_core.training.data.source import chat_examples
from nvium_core.training.data.tokens import encoded
from nvium_core.training.errors import DataError

MAX_HELD_OUT, HELD_OUT_SHARE = 8_192, 0.1
"""The end of a text is held out for measuring: this share of its tokens, and at most this number."""


@dataclass(frozen=True)
class TrainingText:
    """The examples of a text, each short enough for a window. `kind` is "conversations" or "text"."""

    kind: str
    training: list[Example]
    held_out: list[Example]


def read_text(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, max_tokens: int) -> TrainingText:
    """Read up to `max_tokens` training tokens of a text, and hold out its end. Raise `DataError` if it is unusable."""
    is_chat = holds_conversations(path)
    if is_chat:
        examples = chat_examples(path, tokenizer, context + 1)  # the last token is never an input
    else:
        examples = documents(path, tokenizer, context, max_tokens)
    training, held_out = split(examples, path)
    return TrainingText("conversations" if is_chat else "text", training, held_out)


def documents(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, max_tokens: int) -> list[Example]:
    """Cut each document into windows. A window starts with the last token of the document's previous window."""
    parts = encoded(documents_of(path), tokenizer, max_tokens + MAX_HELD_OUT)
    tokens = np.concatenate(list(parts)).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.eos_token_id)
    windows = (
        (start, document[start : start + context + 1])
        for document in np.split(tokens, starts)
        for start in range(0, len(document) - 1, context)
    )
    return [Example(window, np.ones(len(window), dtype=bool), is_continued=start > 0) for start, window in windows]


def document_numbers(examples: Sequence[Example]) -> list[int]:
    """Return the number of each example's document or conversation, from 0."""
    numbers = np.cumsum([not each.is_continued for each in examples])
    found: list[int] = (numbers - numbers[0]).tolist()
    return found


def split(examples: Sequence[Example], path: Path) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples, at least one each."""
    ends = np.cumsum([len(each) for each in examples])
    num_tokens = int(ends[-1]) if len(ends) else 0
    num_held_out = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * num_tokens))
    num_training = min(int(np.searchsorted(ends, num_tokens - num_held_out)) + 1, len(examples) - 1)
    if num_training < 1:
        raise DataError(f"{path}: {num_tokens} tokens of text are too few")
    return list(examples[:num_training]), list(examples[num_training:])
