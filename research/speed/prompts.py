"""The prompts of speed measurements, by category: openings of documents, or the first turns of Spec-Bench's questions.

As in Spec-Bench's tables, the eight kinds of MT-Bench questions are one category, multi-turn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.perplexity import EvaluationError

MAX_NEW_TOKENS = 128
OPENINGS, OPENING_CHARACTERS, NUM_OPENINGS = "openings", 200, 8
MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Prompts = Mapping[str, Sequence[str]]
"""Prompts by category."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Tokenized prompts by category, the length of answers, and the number of truncated prompts."""

    prompts: dict[str, list[list[int]]]
    max_new_tokens: int
    prompts_cut: int

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of prompts by category."""
        return {category: len(of_category) for category, of_category in self.prompts.items()}


def openings(documents: Sequence[str], number: int = NUM_OPENINGS) -> Prompts:
    """Return the openings of up to `number` documents, as one category of prompts."""
    spread = documents[:: max(1, len(documents) // number)][:number]
    return {OPENINGS: [document[:OPENING_CHARACTERS] for document in spread]}


def read_questions(path: Path, per_category: int | None = None) -> Prompts:
    """Read the first `per_category` prompts of every category. Raise `EvaluationError` naming an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: {error}") from error
    prompts: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        category, text = first_turn(line, f"{path}, line {number}")
        prompts.setdefault(MULTI_TURN if category in MT_BENCH else category, []).append(text)
    if not prompts:
        raise EvaluationError(f"{path}: no questions")
    return {category: texts[:per_category] for category, texts in prompts.items()}


def first_turn(line: str, place: str) -> tuple[str, str]:
    """Parse a line's category and first turn."""
    try:
        question: Any = json.loads(line)
        category, text = question["category"], question["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(f"{place}: must be an object with a category and turns ({error!r})") from error
    if not (isinstance(category, str) and isinstance(text, str)):
        raise EvaluationError(f"{place}: category and turns must be strings")
    return category, text


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Prompts, context: int, num_tokens: int = MAX_NEW_TOKENS
) -> PromptSet:
    """Tokenize prompts. Answers get at most half of the context, and long prompts lose their beginning."""
    num_tokens = min(num_tokens, context // 2)
    room = context - num_tokens
    whole = {category: [tokens(tokenizer, text) for text in texts] for category, texts in prompts.items()}
    cut = {category: [ids[-room:] for ids in of_category] for category, of_category in whole.items()}
    num_cut = sum(len(ids) > room for of_category in whole.values() for ids in of_category)
    return PromptSet(prompts=cut, max_new_tokens=num_tokens, prompts_cut=num_cut)


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text. An empty text becomes an end-of-text token."""
    return list(tokenizer(text, verbose=False).input_ids) or [tokenizer.eos_token_id]
