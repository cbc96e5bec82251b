"""A run's training and validation data: documents or conversations, depending on the recipe.

Documents become one stream of tokens, with end-of-text before every document and at the end. Neither a text nor its
tokens have to fit into memory. The run's folder stores a description of the data, and the tokenizer and tokens of
documents. Without a given tokenizer, a byte-level BPE is trained on the documents.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nvium_core.errors import DataError, TrainingError
from nvium_core.text.folder_tokenizer import folder_tokenizer, set_frame
from nvium_core.training.data.texts import (
    CHAT_SUFFIXES,
    END_OF_TEXT,
    Example,
    documents_of,
    example,
    holds_conversations,
    read_conversations,
)
from nvium_core.training.data.windows import PackedConversations, PackedStream, Tokens, Windows
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note
from nvium_core.training.run_folder import differences, save_tokenizer

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 2**22
"""A batch is tokenized once it has this many documents or characters."""

TOKENS, ORIGIN = "tokens.npy", "text.json"
MIN_BYTES_PER_TOKEN = 4  # of the context, if a tokenizer is trained; English has about as many
MAX_TOKENIZER_CHARACTERS = 2**28  # a tokenizer is trained on about this many characters of a text


def prepare_text(recipe: Recipe, data: Path, folder: Path) -> tuple[PreTrainedTokenizerBase, Windows]:
    """Return the tokenizer and the training windows. Reuse the tokens in the run's folder, or write them there.

    Raise `DataError` if the data contain conversations and the recipe trains on documents, or the reverse. Raise
    `TrainingError` if the run has begun with other data.
    """
    check_kind(recipe, data)
    context = recipe.shape.context
    if recipe.text == "documents":
        with same_text(recipe, data, folder):
            if not ((folder / TOKENS).exists() and (folder / ORIGIN).exists()):
                make_tokens(recipe, data, folder)
        path, tokenizer = folder / TOKENS, folder_tokenizer(folder / "tokenizer")
        try:
            return tokenizer, PackedStream(np.load(path, mmap_mode="r"), tokenizer.eos_token_id, context, recipe.seed)
        except (ValueError, EOFError) as error:
            raise TrainingError(f"{path}: damaged ({error}); delete it to tokenize the text again") from error
    given = given_tokenizer(recipe)
    if given is None:
        raise TrainingError("conversations need an existing tokenizer: pass --set initial=MODEL or tokenizer=NAME")
    with same_text(recipe, data, folder):
        examples = chat_examples(data, given, context)
    return given, PackedConversations(examples, given.eos_token_id, context, recipe.seed)


def validation_text(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Return the first documents or conversations of a held-out file, up to a total of `validation_tokens` tokens."""
    check_kind(recipe, data)
    context = recipe.shape.context
    if recipe.text == "documents":
        tokens = np.concatenate(list(encoded(documents_of(data), tokenizer, recipe.validation_tokens)))
        check_length(data, len(tokens), context)
        return PackedStream(tokens, tokenizer.eos_token_id, context)
    examples = chat_examples(data, tokenizer, context)
    ends = accumulate(len(each) for each in examples)
    kept = [each for each, end in zip(examples, ends, strict=True) if end <= recipe.validation_tokens]
    return PackedConversations(kept or examples[:1], tokenizer.eos_token_id, context)


def check_kind(recipe: Recipe, data: Path) -> None:
    if recipe.text == "documents" and holds_conversations(data):
        raise DataError(
            f"{data}: contains conversations, but this recipe trains on documents; "
            "use the recipe `stories-chat` with --set initial=MODEL"
        )
    if recipe.text == "conversations" and data.exists() and not data.name.endswith(CHAT_SUFFIXES):
        raise DataError(
            f"{data}: contains documents, but this recipe trains on conversations (.jsonl); "
            "use a recipe such as `small`"
        )


def make_tokens(recipe: Recipe, data: Path, folder: Path) -> None:
    """Write the tokenizer, then as many tokens as the run reads, atomically.

    If the recipe has no tokenizer, train one on the text. Raise `DataError` if the text is too short.
    """
    shape, tokenizer, max_tokens = recipe.shape, given_tokenizer(recipe), recipe.total_tokens + 1
    if tokenizer is None:
        min_bytes = MIN_BYTES_PER_TOKEN * shape.context
        num_bytes = sum(len(document.encode()) for document in first_documents(data, min_bytes))
        if num_bytes < min_bytes:
            few = f"{num_bytes:,} bytes of text are too few for a context of {shape.context:,} tokens"
            raise DataError(f"{data}: {few}; at least {min_bytes:,} are needed")
        note(f"training a tokenizer of {shape.vocab_size:,} tokens")
        documents = first_documents(data, MAX_TOKENIZER_CHARACTERS)
        tokenizer = train_tokenizer(documents, shape.vocab_size, shape.context)
    save_tokenizer(tokenizer, folder / "tokenizer")
    note(f"tokenizing {data}, up to {max_tokens:,} tokens")
    partial = folder / f"partial-{TOKENS}"
    num_tokens = write_tokens(documents_of(data), folder_tokenizer(folder / "tokenizer"), max_tokens, partial)
    check_length(data, num_tokens, shape.context)
    partial.replace(folder / TOKENS)


def first_documents(data: Path, num_characters: int) -> Iterator[str]:
    """Yield documents until they have `num_characters` characters."""
    for document in documents_of(data):
        yield document
        num_characters -= len(document)
        if num_characters <= 0:
            return


def check_length(data: Path, num_tokens: int, context: int) -> None:
    if num_tokens <= context:
        raise DataError(f"{data}: {num_tokens} tokens of text are too few for a context of {context} tokens")


def chat_examples(path: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Example]:
    """Read and tokenize a chat file, and truncate conversations to `context` tokens.

    Drop conversations whose first `context` tokens contain no answer. Print how many conversations were truncated or
    dropped. Raise `DataError` naming the file and line if a line is invalid.
    """
    examples, lines = list[Example](), read_conversations(path)
    for number, line in track(lines.items(), "tokenizing", console=Console(stderr=True), transient=True):
        try:
            examples.append(example(line, tokenizer))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    cut = [Example(each.tokens[:context], each.is_answer[:context]) for each in examples]
    kept = [each for each in cut if each.is_answer.any()]
    if not kept:
        raise DataError(f"{path}: no conversation has an answer within a context of {context} tokens")
    num_long, num_dropped = sum(len(each) > context for each in examples), len(examples) - len(kept)
    if num_long:
        note(
            f"{path}: {num_long} of {len(examples)} conversations exceed the context of {context} tokens; "
            f"{num_dropped} dropped, the others truncated"
        )
    return kept


@contextmanager
def same_text(recipe: Recipe, data: Path, folder: Path) -> Iterator[None]:
    """Describe everything that a run's tokens depend on, once they are made in this context.

    Raise `TrainingError` if the folder's tokens were made from other data or with other settings.
    """
    path, shape = folder / ORIGIN, recipe.shape
    origin = {
        "data": text_digest(data),
        "vocab_size": shape.vocab_size,
        "context": shape.context,
        "tokenizer": recipe.tokenizer or recipe.initial,
    }
    try:
        others = differences(json.loads(path.read_text(encoding="utf-8")), origin) if path.exists() else set()
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}; delete the folder's tokens to make them again") from error
    if others:
        names = ", ".join(sorted(others))
        raise TrainingError(f"{folder}: the folder's tokens were made with another {names}; choose another --folder")
    yield
    if not path.exists():
        path.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def text_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


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
