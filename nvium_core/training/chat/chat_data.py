"""Fine-tuning data from a chat file. The run's folder stores a description of the file."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import read_conversations
from nvium_core.training.chat.examples import Example, example
from nvium_core.training.chat.packing import PackedConversations
from nvium_core.training.data.tokens import same_text
from nvium_core.training.errors import DataError, TrainingError
from nvium_core.training.initial import given_tokenizer
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note


def prepare_conversations(
    recipe: Recipe, data: Path, folder: Path
) -> tuple[PreTrainedTokenizerBase, PackedConversations]:
    """Return the tokenizer and the training windows. Raise `TrainingError` if the run has begun with another file."""
    tokenizer = given_tokenizer(recipe)
    if tokenizer is None:
        raise TrainingError("conversations need an existing tokenizer: pass --set initial=MODEL or tokenizer=NAME")
    with same_text(recipe, data, folder):
        examples = chat_examples(data, tokenizer, recipe.shape.context)
    return tokenizer, PackedConversations(examples, tokenizer.eos_token_id, recipe.seed)


def validation_conversations(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> PackedConversations:
    """Return the first conversations of a held-out file, up to a total of `validation_tokens` tokens."""
    examples = chat_examples(data, tokenizer, recipe.shape.context)
    ends = accumulate(len(each) for each in examples)
    kept = [each for each, end in zip(examples, ends, strict=True) if end <= recipe.validation_tokens]
    return PackedConversations(kept or examples[:1], tokenizer.eos_token_id)


def chat_examples(path: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Example]:
    """Read and tokenize a chat file, and truncate conversations to `context` tokens.

    Drop conversations whose first `context` tokens contain no answer. Print how many conversations were truncated or
    dropped. Raise `DataError` naming the file and line if a line is invalid.
    """
    examples = list(track(encoded(path, tokenizer), "tokenizing", console=Console(stderr=True), transient=True))
    kept = [each.cut(context) for each in examples if each.is_answer[:context].any()]
    if not kept:
        raise DataError(f"{path}: no conversation has an answer within a context of {context} tokens")
    num_long, num_dropped = sum(len(each) > context for each in examples), len(examples) - len(kept)
    if num_long:
        note(
            f"{path}: {num_long} of {len(examples)} conversations exceed the context of {context} tokens; "
            f"{num_dropped} dropped, the others truncated"
        )
    return kept


def encoded(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    for number, line in read_conversations(path).items():
        try:
            yield example(line, tokenizer)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
