"""A run's token stream. The run's folder stores it, with the tokenizer and a description of the source.

A plain text file becomes one token file. A corpus (see `is_corpus`) becomes shards, so neither its text nor its tokens
have to fit into memory.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nvium_core.training.data.corpus import corpus_files, documents_of, is_corpus, read_documents
from nvium_core.training.data.documents import DataError, Diet
from nvium_core.training.data.encoding import encoded
from nvium_core.training.data.shards import write_shards
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.data.windows import PackedStream, ShardedTokens, Tokens
from nvium_core.training.distributed import Processes
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note

MAX_TOKENIZER_CHARACTERS = 2**28  # a tokenizer is trained on about this many characters of a corpus

ALONE = Processes()


def prepare_documents(
    recipe: Recipe, data: Path, folder: Path, processes: Processes = ALONE
) -> tuple[PreTrainedTokenizerBase, PackedStream]:
    """Return the tokenizer and the token stream. If the folder has none, write them first.

    Every process must call this.
    """
    origin = text_origin(recipe, data)
    is_tokenized = any(path.exists() for path in token_files(folder))
    processes.wait()
    if is_tokenized:
        check_origin(folder / "text.json", origin)
    else:
        make_tokens(recipe, data, folder, origin, processes)
    tokenizer = saved_tokenizer(folder)
    return tokenizer, PackedStream(read_tokens(folder), tokenizer.eos_token_id, recipe.seed)


def token_files(folder: Path) -> tuple[Path, Path]:
    """Return where a run's folder stores tokens: the file for a plain text, and the shard folder for a corpus."""
    return folder / "tokens.npy", folder / "tokens"


def validation_documents(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedStream:
    parts = encoded(documents_of(data), tokenizer, recipe.validation_tokens)
    return PackedStream(np.concatenate(list(parts)), tokenizer.eos_token_id)


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
    """Tokenize as much of a text as the run reads. With `epochs` or a data mixture, tokenize all of it."""
    documents = read_documents(data)
    tokenizer = make_tokenizer(recipe, documents, file.parent)
    reads_all = recipe.epochs > 0 or recipe.diet != Diet()
    max_tokens = sys.maxsize if reads_all else recipe.total_tokens + 1
    note(f"tokenizing {data}" + ("" if reads_all else f", up to {max_tokens:,} tokens"))
    tokens = np.concatenate(list(encoded(recipe.diet.readings(documents, recipe.seed), tokenizer, max_tokens)))
    check_length(len(tokens), recipe.longest_window, data)
    np.save(file, tokens)


def make_shards(recipe: Recipe, data: Path, shards: Path, processes: Processes) -> None:
    """Tokenize as much of a corpus as the run reads. Every process must call this."""
    if recipe.diet != Diet():
        raise DataError(
            f"{data}: a streamed corpus does not support a data mixture; "
            "pass a single .txt or .txt.xz file, or a recipe without a diet"
        )
    if processes.is_first:
        make_tokenizer(recipe, first_documents(documents_of(data), MAX_TOKENIZER_CHARACTERS), shards.parent)
        shutil.rmtree(shards, ignore_errors=True)
        shards.mkdir()
    processes.wait()
    if processes.is_first:
        note(f"tokenizing up to {recipe.total_tokens + 1:,} tokens of {data}")
    count = write_shards(data, recipe.total_tokens + 1, saved_tokenizer(shards.parent), shards, processes)
    check_length(count, recipe.longest_window, data)


def make_tokenizer(recipe: Recipe, documents: Iterable[str], folder: Path) -> PreTrainedTokenizerBase:
    """Save and reload the recipe's tokenizer. If the recipe has none, train a tokenizer on the documents."""
    shape, tokenizer = recipe.shape, given_tokenizer(recipe)
    if tokenizer is None:
        note(f"training a tokenizer of {shape.vocab_size:,} tokens")
        tokenizer = train_tokenizer(documents, shape.vocab_size, shape.context)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return saved_tokenizer(folder)


def saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    return tokenizer


def first_documents(documents: Iterable[str], max_characters: int) -> Iterator[str]:
    for document in documents:
        yield document
        max_characters -= len(document)
        if max_characters <= 0:
            return


def check_length(num_tokens: int, context: int, data: Path) -> None:
    if num_tokens <= context:
        raise DataError(f"{data}: {num_tokens} tokens of text are too few for a context of {context} tokens")


def read_tokens(folder: Path) -> Tokens | ShardedTokens:
    """Memory-map a folder's tokens."""
    whole, shards = token_files(folder)
    is_sharded = shards.is_dir()
    try:
        parts = [np.load(path, mmap_mode="r") for path in (sorted(shards.iterdir()) if is_sharded else [whole])]
    except (ValueError, EOFError) as error:
        made = shards if is_sharded else whole
        raise TrainingError(f"{made}: damaged ({error}); delete it, and the text is tokenized again") from error
    return ShardedTokens(parts) if is_sharded else parts[0]


def text_origin(recipe: Recipe, data: Path) -> dict[str, Any]:
    """Describe everything that a run's tokens depend on."""
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
    """Return the SHA-256 of a file. For a folder, which may be large, hash only the files' names and sizes."""
    try:
        if path.is_dir():
            listed = [f"{each.relative_to(path)} {each.stat().st_size}" for each in corpus_files(path)]
            return hashlib.sha256("\n".join(listed).encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def check_origin(path: Path, origin: dict[str, Any]) -> None:
    """Raise `TrainingError` if a folder's tokens were made from other data or with other settings."""
    try:
        others = differences(json.loads(path.read_text(encoding="utf-8")), origin)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}; delete the folder's tokens to make them again") from error
    if others:
        raise TrainingError(
            f"{path.parent}: the folder's tokens were made with another {', '.join(sorted(others))}; "
            "choose another --folder"
        )


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted keys at which two nested dictionaries differ."""
    keys = set[str]()
    for key in one.keys() | other.keys():
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            keys.add(prefix + key)
    return keys
