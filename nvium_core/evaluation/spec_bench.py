"""Spec-Bench's prompts by category, from its `question.jsonl`: the first turn of every question.

The eight kinds of MT-Bench questions are one category, multi-turn, as in the benchmark's own tables.
"""

import json
from pathlib import Path
from typing import Any

from nvium_core.evaluation.predictions import EvaluationError

MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Prompts = dict[str, list[str]]
"""Texts by category."""


def read_prompts(path: Path, per_category: int | None = None) -> Prompts:
    """The first `per_category` prompts of every category, all if None. Raises `EvaluationError` naming file and
    line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: {error}") from error
    prompts: Prompts = {}
    for number, line in enumerate(lines, 1):
        category, text = first_turn(line, f"{path}, line {number}")
        prompts.setdefault(MULTI_TURN if category in MT_BENCH else category, []).append(text)
    if not prompts:
        raise EvaluationError(f"{path}: no questions")
    return {category: texts[:per_category] for category, texts in prompts.items()}


def first_turn(line: str, place: str) -> tuple[str, str]:
    """Category and text."""
    try:
        question: Any = json.loads(line)
        category, text = question["category"], question["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(f"{place}: not a question with a category and turns ({error!r})") from error
    if not (isinstance(category, str) and isinstance(text, str)):
        raise EvaluationError(f"{place}: category and turns must be text")
    return category, text
