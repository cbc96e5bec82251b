"""Documents as one stream of tokens, and the byte-level BPE tokenizers that a run trains.

A stream has end-of-text before every document and at the end. Neither a text nor its tokens have to fit into memory.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from nvium_core.text.frame import set_frame
from nvium_core.training.data.texts import END_OF_TEXT
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


def train_tokenizer(documents: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer that encodes any text without loss. Every encoding starts with end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    set_frame(tokenizer, tokenizer.encode(END_OF_TEXT).ids, [])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template. Any `AutoTokenizer` can load them."""
    tokenizer.save_pretrained(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
        (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tokens(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int, path: Path) -> int:
    """Write at most `max_tokens` tokens of a text to an .npy file, and return their number."""
    header = {"descr": np.dtype(token_dtype(tokenizer)).str, "fortran_order": False, "shape": (0,)}
    num_tokens = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in encoded(documents, tokenizer, max_tokens):
            part.tofile(file)
            num_tokens += len(part)
        file.seek(0)  # a header has room for any number
        np.lib.format.write_array_header_1_0(file, header | {"shape": (num_tokens,)})
    return num_tokens
