"""What exits learn from, and what they are measured on: conversations of the model's own, a text, or both.

In a text every token counts, in a conversation those of answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from nvium_core.training.chat.conversations import holds_conversations, read_conversations
from nvium_core.training.chat.examples import Example, example
from nvium_core.training.data.corpus import documents_of
from nvium_core.training.data.documents import DataError
from nvium_core.training.data.encoding import encoded

MAX_HELD_OUT, HELD_OUT_SHARE = 8_192, 0.1
"""Tokens of each kind, and share of it at most, to measure on and not to learn from."""


@dataclass(frozen=True)
class Text:
    """A text of one kind. Examples fit into a window."""

    kind: str
    learnt: list[Example]
    held_out: list[Example]


def read_text(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, most: int) -> Text:
    """Up to `most` tokens to learn from, the last ones held out. Raises `DataError` naming the file."""
    is_chat = holds_conversations(path)
    found = conversations(path, tokenizer, context) if is_chat else pieces(path, tokenizer, context, most)
    learnt, held_out = split(found, path)
    return Text("conversations" if is_chat else "text", learnt, held_out)


def conversations(path: Path, tokenizer: PreTrainedTokenizerFast, context: int) -> list[Example]:
    """Cut to a window; those whose answer begins behind it are left out."""
    found = [example(said, tokenizer).cut(context + 1) for said in read_conversations(path).values()]
    return [each for each in found if each.is_answer[1:].any()]


def pieces(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, most: int) -> list[Example]:
    """Documents, cut into windows."""
    if tokenizer.eos_token_id is None:
        raise DataError("the model's tokenizer has no end-of-text, which stands between documents")
    parts = encoded(documents_of(path), tokenizer, most + MAX_HELD_OUT)
    tokens = np.concatenate(list(parts)).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.eos_token_id)
    found = (piece for document in np.split(tokens, starts) for piece in windows_of(document, context))
    return [Example(piece, np.ones(len(piece), dtype=bool)) for piece in found]


def windows_of(document: np.ndarray, context: int) -> Iterator[np.ndarray]:
    """Each begins with the last token of the one before."""
    for start in range(0, len(document) - 1, context):
        yield document[start : start + context + 1]


def split(examples: Sequence[Example], path: Path) -> tuple[list[Example], list[Example]]:
    """Split off the end, at least one example, as held-out text."""
    ends = np.cumsum([len(each) for each in examples])
    num_tokens = int(ends[-1]) if len(ends) else 0
    num_held_out = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * num_tokens))
    num_learnt = min(int(np.searchsorted(ends, num_tokens - num_held_out)) + 1, len(examples) - 1)
    if num_learnt < 1:
        raise DataError(f"{path}: {num_tokens} tokens of text are too few")
    return list(examples[:num_learnt]), list(examples[num_learnt:])
