"""A run's training and validation data: documents or conversations, depending on the recipe.

The run's folder stores a description of the data, and the tokenizer and tokens of documents.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import DataError, TrainingError
from nvium_core.text.folder_tokenizer import folder_tokenizer
from nvium_core.training.data.texts import (
    CHAT_SUFFIXES,
    Example,
    documents_of,
    example,
    holds_conversations,
    read_conversations,
)
from nvium_core.training.data.tokens import encoded, save_tokenizer, train_tokenizer, write_tokens
from nvium_core.training.data.windows import PackedConversations, PackedStream, Tokens, Windows
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note
from nvium_core.training.run_folder import differences

TOKENS, ORIGIN = "tokens.npy", "text.json"
MIN_BYTES_PER_TOKEN = 4  # of the context, if a tokenizer is trained; English has about as many
MAX_TOKENIZER_CHARACTERS = 2**28  # a tokenizer is trained on about this many characters of a text


def prepare_text(recipe: Recipe, data: Path, folder: Path) -> tuple[PreTrainedTokenizerBase, Windows]:
    """Return the tokenizer and the training windows. Reuse the tokens in the run's folder, or write them there.

    Raise `DataError` if the data contain conversations and the recipe trains on documents, or the reverse. Raise
    `TrainingError` if the run has begun with other data.
    """
    check_kind(recipe, data)
    if recipe.text == "documents":
        with same_text(recipe, data, folder):
            if not ((folder / TOKENS).exists() and (folder / ORIGIN).exists()):
                make_tokens(recipe, data, folder)
        tokenizer = folder_tokenizer(folder / "tokenizer")
        return tokenizer, PackedStream(read_tokens(folder), tokenizer.eos_token_id, recipe.seed)
    given = given_tokenizer(recipe)
    if given is None:
        raise TrainingError("conversations need an existing tokenizer: pass --set initial=MODEL or tokenizer=NAME")
    with same_text(recipe, data, folder):
        examples = chat_examples(data, given, recipe.shape.context)
    return given, PackedConversations(examples, given.eos_token_id, recipe.seed)


def validation_text(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Return the first documents or conversations of a held-out file, up to a total of `validation_tokens` tokens."""
    check_kind(recipe, data)
    if recipe.text == "documents":
        tokens = np.concatenate(list(encoded(documents_of(data), tokenizer, recipe.validation_tokens)))
        check_length(data, len(tokens), recipe.shape.context)
        return PackedStream(tokens, tokenizer.eos_token_id)
    examples = chat_examples(data, tokenizer, recipe.shape.context)
    ends = accumulate(len(each) for each in examples)
    kept = [each for each, end in zip(examples, ends, strict=True) if end <= recipe.validation_tokens]
    return PackedConversations(kept or examples[:1], tokenizer.eos_token_id)


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


def read_tokens(folder: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(folder / TOKENS, mmap_mode="r")
        return tokens
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{folder / TOKENS}: damaged ({error}); delete it to tokenize the text again") from error


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
