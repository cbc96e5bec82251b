"""Prompts of a load test: Spec-Bench's questions, prompts from a file, or random tokens."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Self

MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories in Spec-Bench's file that Spec-Bench's tables combine as `multi-turn`."""


class WorkloadError(ValueError):
    """An invalid workload. The message is one line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: a text, or the ids of its tokens."""

    content: str | tuple[int, ...]
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of token counts from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise WorkloadError(f"lengths must be at least 1 and ascending, got {self}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `64` or `16:256`. Raise `ValueError` for other formats."""
        low, _, high = text.partition(":")
        return cls(int(low), int(high or low))

    def draw(self, draws: random.Random) -> int:
        return draws.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


DEFAULT_PROMPTS = tuple(
    Prompt(text)
    for text in (
        "Once upon a time there was a small fox who",
        "In a village by the sea lived an old woman and her cat.",
        "The little boat was afraid of the big waves, but",
        "One morning the baker found a letter under the door.",
        "Tom wanted to fly, so he asked the bird",
        "Far away, behind seven mountains, a king had",
        "It was raining, and Lily could not find her red shoes.",
        "The moon looked down and said:",
    )
)


def random_prompts(token_ids: Sequence[int], lengths: Lengths, count: int, seed: int) -> tuple[Prompt, ...]:
    """Draw `count` prompts of random tokens. The prompts differ, so the server's prefix cache cannot help."""
    draws = random.Random(seed)
    return tuple(Prompt(tuple(draws.choices(token_ids, k=lengths.draw(draws)))) for _ in range(count))


def read_prompts(path: Path, categories: Sequence[str] = ()) -> tuple[Prompt, ...]:
    """Read one prompt per line. A line of a .jsonl file has `prompt` or `turns`, whose first item is the prompt.

    Use only prompts of `categories`, or all prompts if `categories` is empty. Take prompts from the categories in
    turn. Raise `WorkloadError` if the file is invalid.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        prompts = [Prompt(line) for line in lines]
    else:
        prompts = [_prompt_of(line, f"{path}, entry {number}") for number, line in enumerate(lines, 1)]
    if not prompts:
        raise WorkloadError(f"{path}: contains no prompts")
    return _by_turns(prompts, categories, path)


def _by_turns(prompts: Iterable[Prompt], wanted: Sequence[str], path: Path) -> tuple[Prompt, ...]:
    groups: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    if unknown := set(wanted) - groups.keys():
        known = ", ".join(name for name in groups if name) or "none"
        raise WorkloadError(f"{path}: no category {', '.join(sorted(unknown))}; available: {known}")
    rounds = zip_longest(*(group for name, group in groups.items() if name in wanted or not wanted))
    return tuple(prompt for prompt in chain(*rounds) if prompt)


def _prompt_of(line: str, place: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
        content = entry["turns"][0] if "turns" in entry else entry["prompt"]
        category = entry.get("category")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{place}: must have `turns` or `prompt`") from error
    if not isinstance(content, str) or not isinstance(category, str | None):
        raise WorkloadError(f"{place}: prompt and category must be strings")
    return Prompt(content, MULTI_TURN if category in MT_BENCH else category)
