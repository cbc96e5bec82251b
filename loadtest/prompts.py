"""Prompts of a load test: the built-in ones, or from a file."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


class WorkloadError(ValueError):
    """An invalid workload. The message is one line."""


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


DEFAULT_PROMPTS = (
    "Once upon a time there was a small fox who",
    "In a village by the sea lived an old woman and her cat.",
    "The little boat was afraid of the big waves, but",
    "One morning the baker found a letter under the door.",
    "Tom wanted to fly, so he asked the bird",
    "Far away, behind seven mountains, a king had",
    "It was raining, and Lily could not find her red shoes.",
    "The moon looked down and said:",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read one prompt per line. A line of a .jsonl file has `prompt` or `turns`, whose first item is the prompt.

    Raise `WorkloadError` if the file is invalid.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read {path}: {error}") from error
    if not lines:
        raise WorkloadError(f"{path}: contains no prompts")
    if path.suffix != ".jsonl":
        return tuple(lines)
    return tuple(_prompt_of(line, f"{path}, entry {number}") for number, line in enumerate(lines, 1))


def _prompt_of(line: str, place: str) -> str:
    try:
        entry: Any = json.loads(line)
        prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise WorkloadError(f"{place}: must have `turns` or `prompt`") from error
    if not isinstance(prompt, str):
        raise WorkloadError(f"{place}: the prompt must be a string")
    return prompt
