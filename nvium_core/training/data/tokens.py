"""A run's token stream. The run's folder stores it, with the tokenizer and a description of the source.

Neither the text nor its tokens have to fit into memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.text.folder_tokenizer import folder_tokenizer
from nvium_core.training.checkpoint import differences
from nvium_core.training.data.corpus import documents_of
from nvium_core.training.data.encoding import encoded, token_dtype
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.data.windows import PackedStream, Tokens
from nvium_core.training.errors import DataError, TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note

TOKENS, ORIGIN = "tokens.npy", "text.json"
MIN_BYTES_PER_TOKEN = 4  # of the context, if a tokenizer is trained; English has about as many
MAX_TOKENIZER_CHARACTERS = 2**28  # a tokenizer is trained on about this many characters of a text


def prepare_documents(recipe: Recipe, data: Path, folder: Path) -> tuple[PreTrainedTokenizerBase, PackedStream]:
    """Return the tokenizer and the token stream. If the folder has none, write them first."""
    with same_text(recipe, data, folder):
        if not ((folder / TOKENS).exists() and (folder / ORIGIN).exists()):
            make_tokens(recipe, data, folder)
    tokenizer = folder_tokenizer(folder / "tokenizer")
    return tokenizer, PackedStream(read_tokens(folder), tokenizer.eos_token_id, recipe.seed)


def validation_documents(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedStream:
    tokens = np.concatenate(list(encoded(documents_of(data), tokenizer, recipe.validation_tokens)))
    check_length(data, len(tokens), recipe.shape.context)
    return PackedStream(tokens, tokenizer.eos_token_id)


def check_length(data: Path, num_tokens: int, context: int) -> None:
    if num_tokens <= context:
        raise DataError(f"{data}: {num_tokens} tokens of text are too few for a context of {context} tokens")


def check_size(data: Path, context: int) -> None:
    """Raise `DataError` if a text is too short for training a tokenizer on it."""
    min_bytes, num_bytes = MIN_BYTES_PER_TOKEN * context, 0
    for document in documents_of(data):
        num_bytes += len(document.encode())
        if num_bytes >= min_bytes:
            return
    few = f"{num_bytes:,} bytes of text are too few for a context of {context:,} tokens"
    raise DataError(f"{data}: {few}; at least {min_bytes:,} are needed")


def make_tokens(recipe: Recipe, data: Path, folder: Path) -> None:
    """Write the tokenizer, then as many tokens as the run reads, atomically."""
    partial, max_tokens = folder / f"partial-{TOKENS}", recipe.total_tokens + 1
    make_tokenizer(recipe, data, folder)
    note(f"tokenizing {data}, up to {max_tokens:,} tokens")
    num_tokens = write_tokens(documents_of(data), folder_tokenizer(folder / "tokenizer"), max_tokens, partial)
    check_length(data, num_tokens, recipe.shape.context)
    partial.replace(folder / TOKENS)


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


def make_tokenizer(recipe: Recipe, data: Path, folder: Path) -> None:
    """Save the recipe's tokenizer. If the recipe has none, train a tokenizer on the text."""
    shape, tokenizer = recipe.shape, given_tokenizer(recipe)
    if tokenizer is None:
        check_size(data, shape.context)
        note(f"training a tokenizer of {shape.vocab_size:,} tokens")
        documents = first_documents(documents_of(data), MAX_TOKENIZER_CHARACTERS)
        tokenizer = train_tokenizer(documents, shape.vocab_size, shape.context)
    save_tokenizer(tokenizer, folder / "tokenizer")


def first_documents(documents: Iterable[str], max_characters: int) -> Iterator[str]:
    for document in documents:
        yield document
        max_characters -= len(document)
        if max_characters <= 0:
            return


def read_tokens(folder: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(folder / TOKENS, mmap_mode="r")
        return tokens
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{folder / TOKENS}: damaged ({error}); delete it to tokenize the text again") from error


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
