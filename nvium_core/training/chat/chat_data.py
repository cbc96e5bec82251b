"""Conversations for tuning from a data file: stories become instructions, chats stay as they are.

A run keeps its examples and their origin in its folder.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import Line, read_conversations
from nvium_core.training.chat.examples import Example, example, load_examples, save_examples
from nvium_core.training.chat.instructions import instructions
from nvium_core.training.chat.packing import PackedConversations
from nvium_core.training.data.documents import DataError, Diet, read_documents
from nvium_core.training.data.tokens import check_origin, text_origin
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe

CHAT_SUFFIXES = (".jsonl", ".jsonl.xz")


def prepare_conversations(
    recipe: Recipe, data: Path, folder: Path
) -> tuple[PreTrainedTokenizerBase, PackedConversations]:
    """The tokenizer and the packed conversations, read from the folder if a previous start wrote them."""
    tokenizer = given_tokenizer(recipe)
    if tokenizer is None:
        raise TrainingError("conversations need a tokenizer that is there before them: set initial or tokenizer")
    examples_file, origin_file = folder / "examples.npz", folder / "text.json"
    origin = text_origin(recipe, data) | {"answers_only": recipe.answers_only}
    if examples_file.exists():
        check_origin(origin_file, origin)
    else:
        examples = chat_examples(data, tokenizer, recipe.shape.context, recipe.diet, recipe.seed, recipe.answers_only)
        origin_file.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        save_examples(examples_file, examples)
    return tokenizer, in_windows(load_examples(examples_file), tokenizer, recipe, recipe.seed)


def validation_conversations(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedConversations:
    """The first conversations of a held-out text, up to the recipe's `validation_tokens`."""
    examples = chat_examples(data, tokenizer, recipe.shape.context, Diet(), 0, recipe.answers_only)
    ends = accumulate(len(each) for each in examples)
    kept = [each for each, end in zip(examples, ends, strict=True) if end <= recipe.validation_tokens]
    return in_windows(kept or examples[:1], tokenizer, replace(recipe, packing=True), seed=0)


def in_windows(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, recipe: Recipe, seed: int
) -> PackedConversations:
    packing, answers_only = recipe.packing, recipe.answers_only
    return PackedConversations(examples, tokenizer.eos_token_id, seed, together=packing, answers_only=answers_only)


def chat_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, context: int, diet: Diet, seed: int, answers_only: bool = True
) -> list[Example]:
    """Examples of at most `context` tokens, from a chat file (by its suffix) or a text file of stories.

    `diet` and `seed` apply to stories. Longer ones are cut, and with `answers_only` dropped if no answer has begun by
    then; stderr says how many. Raises `DataError` naming the file, and the line of a chat file, that cannot be used.
    """
    console = Console(stderr=True)
    found = list(track(encoded(path, tokenizer, context, diet, seed), "encoding", console=console, transient=True))
    kept = [each.cut(context) for each in found if not answers_only or each.is_answer[:context].any()]
    if not kept:
        raise DataError(f"{path}: no conversation has an answer within a context of {context} tokens")
    num_cut, num_lost = sum(len(each) > context for each in found), len(found) - len(kept)
    if num_cut:
        told = f"{num_cut} of {len(found)} conversations exceed the context and are cut, {num_lost} left out"
        console.print(f"{path}: {told}")
    return kept


def encoded(path: Path, tokenizer: PreTrainedTokenizerBase, context: int, diet: Diet, seed: int) -> Iterator[Example]:
    for place, line in located(path, tokenizer, context, diet, seed):
        try:
            yield example(line, tokenizer)
        except DataError as error:
            raise DataError(f"{path}, {place}: {error}") from error


def located(
    path: Path, tokenizer: PreTrainedTokenizerBase, context: int, diet: Diet, seed: int
) -> Iterator[tuple[str, Line]]:
    """Each conversation or text with its place for messages."""
    if path.name.endswith(CHAT_SUFFIXES):
        yield from ((f"line {number}", line) for number, line in read_conversations(path).items())
    else:
        made = instructions(read_documents(path), diet, tokenizer, context, seed)
        yield from ((f"conversation {number}", conversation) for number, conversation in enumerate(made, 1))
