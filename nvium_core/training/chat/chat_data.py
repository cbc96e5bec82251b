"""Conversations for tuning, read from a chat file. A run keeps its examples and their origin in its folder."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import read_conversations
from nvium_core.training.chat.examples import Example, example, load_examples, save_examples
from nvium_core.training.chat.packing import PackedConversations
from nvium_core.training.data.documents import DataError
from nvium_core.training.data.tokens import check_origin, text_origin
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe


def prepare_conversations(
    recipe: Recipe, data: Path, folder: Path
) -> tuple[PreTrainedTokenizerBase, PackedConversations]:
    """The tokenizer and the packed conversations, read from the folder if a previous start wrote them."""
    tokenizer = given_tokenizer(recipe)
    if tokenizer is None:
        raise TrainingError("conversations need an existing tokenizer: set initial or tokenizer")
    examples_file, origin_file = folder / "examples.npz", folder / "text.json"
    origin = text_origin(recipe, data) | {"answers_only": recipe.answers_only}
    if examples_file.exists():
        check_origin(origin_file, origin)
    else:
        examples = chat_examples(data, tokenizer, recipe.shape.context, recipe.answers_only)
        origin_file.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        save_examples(examples_file, examples)
    return tokenizer, in_windows(load_examples(examples_file), tokenizer, recipe, recipe.seed)


def validation_conversations(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedConversations:
    """The first conversations of a held-out file, up to the recipe's `validation_tokens`."""
    examples = chat_examples(data, tokenizer, recipe.shape.context, recipe.answers_only)
    ends = accumulate(len(each) for each in examples)
    kept = [each for each, end in zip(examples, ends, strict=True) if end <= recipe.validation_tokens]
    return in_windows(kept or examples[:1], tokenizer, replace(recipe, packing=True), seed=0)


def in_windows(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, recipe: Recipe, seed: int
) -> PackedConversations:
    packing, answers_only = recipe.packing, recipe.answers_only
    return PackedConversations(examples, tokenizer.eos_token_id, seed, together=packing, answers_only=answers_only)


def chat_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, context: int, answers_only: bool = True
) -> list[Example]:
    """Examples of at most `context` tokens from a chat file.

    Longer conversations are cut, and with `answers_only` dropped if no answer has begun by then; stderr says how many.
    Raises `DataError` naming the file and line that cannot be used.
    """
    console = Console(stderr=True)
    found = list(track(encoded(path, tokenizer), "encoding", console=console, transient=True))
    kept = [each.cut(context) for each in found if not answers_only or each.is_answer[:context].any()]
    if not kept:
        raise DataError(f"{path}: no conversation has an answer within a context of {context} tokens")
    num_cut, num_lost = sum(len(each) > context for each in found), len(found) - len(kept)
    if num_cut:
        console.print(
            f"{path}: {num_cut} of {len(found)} conversations exceed the context and are cut, {num_lost} left out"
        )
    return kept


def encoded(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    for number, line in read_conversations(path).items():
        try:
            yield example(line, tokenizer)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
