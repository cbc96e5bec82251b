"""The token stream of a run: made from its text once, kept in its folder with the tokenizer and its origin.

A text becomes one file; a corpus becomes shards and is never all in memory, neither text nor tokens.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nvium_core.training.data.corpus import corpus_files, documents_of, is_corpus, stream_documents
from nvium_core.training.data.documents import DataError, Diet, read_documents
from nvium_core.training.data.encoding import encode, encoded
from nvium_core.training.data.shards import write_shards
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.data.windows import PackedStream, ShardedTokens, Tokens
from nvium_core.training.distributed import Processes
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe

MAX_TOKENIZER_CHARACTERS = 2**28
"""Characters of a corpus on which a tokenizer is trained."""

ALONE = Processes()


def prepare_documents(
    recipe: Recipe, data: Path, folder: Path, processes: Processes = ALONE
) -> tuple[PreTrainedTokenizerBase, PackedStream]:
    """The tokenizer and the token stream, read from the folder if a previous start wrote them. Every process must call
    it; those of a corpus share the work."""
    origin = text_origin(recipe, data)
    are_there = any(path.exists() for path in token_files(folder))
    processes.wait()
    if are_there:
        check_origin(folder / "text.json", origin)
    else:
        make_tokens(recipe, data, folder, origin, processes)
    tokenizer = saved_tokenizer(folder)
    return tokenizer, PackedStream(read_tokens(folder), tokenizer.eos_token_id, recipe.seed)


def token_files(folder: Path) -> tuple[Path, Path]:
    """The file of a text, and the folder of a corpus's shards."""
    return folder / "tokens.npy", folder / "tokens"


def validation_documents(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedStream:
    """The first tokens of a held-out text."""
    parts = list(encoded(documents_of(data), tokenizer, recipe.validation_tokens))
    if not parts:
        raise DataError(f"{data}: no documents")
    return PackedStream(np.concatenate(parts), tokenizer.eos_token_id)


def make_tokens(recipe: Recipe, data: Path, folder: Path, origin: dict[str, Any], processes: Processes) -> None:
    """Write the tokenizer, then the tokens atomically."""
    final = token_files(folder)[is_corpus(data)]
    partial = final.with_stem("tokens.partial")
    if is_corpus(data):
        make_shards(recipe, data, partial, processes)
    elif processes.is_first:
        make_stream(recipe, data, partial)
    if processes.is_first:
        (folder / "text.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        partial.replace(final)
    processes.wait()


def make_stream(recipe: Recipe, data: Path, file: Path) -> None:
    """Tokens of a text in memory, in the order of the recipe's diet."""
    documents = read_documents(data)
    tokenizer = make_tokenizer(recipe, documents, file.parent)
    tokens = encode(recipe.diet.readings(documents, recipe.seed), tokenizer)
    check_length(len(tokens), recipe.longest_window, data)
    np.save(file, tokens)


def make_shards(recipe: Recipe, data: Path, shards: Path, processes: Processes) -> None:
    """Tokens of a corpus in order of its files, as many as the run reads once. Every process must call it."""
    if recipe.diet != Diet():
        raise DataError(
            f"{data}: a corpus is not all in memory, so there is no diet; give one text file, or set diet.…"
        )
    if processes.is_first:
        make_tokenizer(recipe, beginning(stream_documents(data), MAX_TOKENIZER_CHARACTERS), shards.parent)
        shutil.rmtree(shards, ignore_errors=True)
        shards.mkdir()
    processes.wait()
    count = write_shards(data, recipe.total_tokens + 1, saved_tokenizer(shards.parent), shards, processes)
    check_length(count, recipe.longest_window, data)


def make_tokenizer(recipe: Recipe, documents: Iterable[str], folder: Path) -> PreTrainedTokenizerBase:
    """The recipe's, or one trained on the documents; written and read back."""
    shape = recipe.shape
    tokenizer = given_tokenizer(recipe) or train_tokenizer(documents, shape.vocab_size, shape.context)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return saved_tokenizer(folder)


def saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    return found


def beginning(documents: Iterable[str], max_characters: int) -> Iterator[str]:
    """Documents of at most this many characters."""
    for document in documents:
        yield document
        max_characters -= len(document)
        if max_characters <= 0:
            return


def check_length(num_tokens: int, context: int, data: Path) -> None:
    """Raise `DataError` for a text too short for one window."""
    if num_tokens <= context:
        raise DataError(f"{data}: {num_tokens} tokens of text are too few for a context of {context}")


def read_tokens(folder: Path) -> Tokens | ShardedTokens:
    """Memory-mapped."""
    whole, parts = token_files(folder)
    return ShardedTokens([mapped(path) for path in sorted(parts.iterdir())]) if parts.is_dir() else mapped(whole)


def mapped(path: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{path}: damaged ({error}); delete it to begin again") from error
    return tokens


def text_origin(recipe: Recipe, data: Path) -> dict[str, Any]:
    """Everything that a run's tokens depend on."""
    shape = recipe.shape
    return {
        "data": text_digest(data),
        "vocab_size": shape.vocab_size,
        "context": shape.context,
        "diet": asdict(recipe.diet),
        "seed": recipe.seed,
        "tokenizer": recipe.tokenizer or recipe.initial,
    }


def text_digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, which is too large to hash, of the names and sizes of its files."""
    try:
        if path.is_dir():
            listed = [f"{each.relative_to(path)} {each.stat().st_size}" for each in corpus_files(path)]
            return hashlib.sha256("\n".join(listed).encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def check_origin(path: Path, origin: dict[str, Any]) -> None:
    """Refuse to resume with tokens made from something else."""
    try:
        others = differences(json.loads(path.read_text(encoding="utf-8")), origin)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}; delete tokens.npy in its folder to start over") from error
    if others:
        raise TrainingError(
            f"{path.parent}: holds tokens of other {', '.join(sorted(others))}; choose another --folder"
        )


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted keys at which two nested tables differ."""
    found = set[str]()
    for key in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            found.add(prefix + key)
    return found
