"""The token stream of a run: made of its text once, and kept in its folder with the tokenizer and its origin."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nvium_core.training.data.documents import DataError, read_documents
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.data.windows import PackedStream, Tokens
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe


def prepare_documents(recipe: Recipe, data: Path, folder: Path) -> tuple[PreTrainedTokenizerBase, PackedStream]:
    """The tokenizer and the token stream, from the folder if an earlier start left them there."""
    tokens_file, origin = folder / "tokens.npy", text_origin(recipe, data)
    if tokens_file.exists():
        check_origin(folder / "text.json", origin)
    else:
        make_tokens(recipe, data, folder, origin)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    return tokenizer, PackedStream(read_tokens(tokens_file), tokenizer.eos_token_id, recipe.seed)


def validation_documents(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedStream:
    """The first tokens of a text that is not trained on."""
    tokens = encode(read_documents(data), tokenizer)[: recipe.validation_tokens]
    return PackedStream(tokens, tokenizer.eos_token_id)


def make_tokens(recipe: Recipe, data: Path, folder: Path, origin: dict[str, Any]) -> None:
    """Write the tokenizer and the tokens, the tokens last and whole."""
    documents = read_documents(data)
    shape = recipe.shape
    tokenizer = given_tokenizer(recipe) or train_tokenizer(documents, shape.vocab_size, shape.context)
    save_tokenizer(tokenizer, folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    tokens = encode(recipe.diet.readings(documents, recipe.seed), tokenizer)
    check_length(tokens, recipe.longest_window, data)
    partial = folder / "tokens.partial.npy"
    np.save(partial, tokens)
    (folder / "text.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "tokens.npy")


def encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """One stream: every document behind its end-of-text token, and one more at the end."""
    end = tokenizer.eos_token_id
    encodings = tokenizer(list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False)
    stream = [token for ids in encodings["input_ids"] for token in (end, *ids)]
    return np.array([*stream, end], dtype=np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def check_length(tokens: Tokens, context: int, data: Path) -> None:
    """Raise `DataError` naming a text that is too short for one window of a context."""
    if len(tokens) <= context:
        raise DataError(f"{data}: {len(tokens)} tokens of text are too few for a context of {context}")


def read_tokens(path: Path) -> Tokens:
    """The tokens, read from the disk as they are needed."""
    try:
        tokens: Tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{path}: damaged ({error}); delete it to begin again") from error
    return tokens


def text_origin(recipe: Recipe, data: Path) -> dict[str, Any]:
    """All that the tokens of a run depend on."""
    shape = recipe.shape
    return {
        "data": file_digest(data),
        "vocab_size": shape.vocab_size,
        "context": shape.context,
        "diet": asdict(recipe.diet),
        "seed": recipe.seed,
        "tokenizer": recipe.tokenizer or recipe.initial,
    }


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content. Raises `DataError` naming one that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def check_origin(path: Path, origin: dict[str, Any]) -> None:
    """Refuse to go on with tokens that were made of something else."""
    try:
        others = differences(json.loads(path.read_text(encoding="utf-8")), origin)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}; delete tokens.npy beside it to begin again") from error
    if others:
        raise TrainingError(
            f"{path.parent}: holds tokens of other {', '.join(sorted(others))}; choose another --folder"
        )


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys at which two nested tables differ."""
    found = set[str]()
    for key in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            found.add(prefix + key)
    return found
