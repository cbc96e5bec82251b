"""Tokenize documents into one stream, with end-of-text before every document and at the end."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.training.data.windows import Tokens

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 2**22
"""A batch is tokenized once it has this many documents or characters."""


def encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return the tokens of some documents, with end-of-text before each."""
    encodings = tokenizer(list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False)
    stream = [token for ids in encodings["input_ids"] for token in (tokenizer.eos_token_id, *ids)]
    return np.array(stream, dtype=token_dtype(tokenizer))


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def encoded(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Tokens]:
    """Yield the stream in parts, up to `max_tokens`."""
    end = np.array([tokenizer.eos_token_id], dtype=token_dtype(tokenizer))
    for part in chain((encode(batch, tokenizer) for batch in batches(documents)), [end]):
        yield part[:max_tokens]
        max_tokens -= len(part)
        if max_tokens <= 0:
            return


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, num_characters = list[str](), 0
    for document in documents:
        batch.append(document)
        num_characters += len(document)
        if len(batch) >= BATCH_DOCUMENTS or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
