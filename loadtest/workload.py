"""What a load test asks for, and when: prompts, sizes and arrival times. Knows nothing of HTTP.

Closed loop: `concurrency` users, each sends its next request when its last is answered.
Open loop: requests arrive at `rate` per second as a Poisson process, however slow the answers are.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

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


class WorkloadError(ValueError):
    """A workload that cannot be run; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`rate` is requests per second; None is the closed loop."""

    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    num_requests: int = 32
    max_tokens: int = 64
    concurrency: int = 4
    rate: float | None = None
    temperature: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("num_requests", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise WorkloadError(f"rate must be positive, got {self.rate}")
        if not self.prompts:
            raise WorkloadError("there are no prompts")

    def requests(self) -> Iterator["Request"]:
        """The requests in order of arrival; prompts repeat when there are fewer."""
        for index, arrival in enumerate(self._arrivals()):
            prompt = self.prompts[index % len(self.prompts)]
            yield Request(prompt, self.max_tokens, self.temperature, self.seed + index, arrival, self.ignore_eos)

    def _arrivals(self) -> list[float]:
        if self.rate is None:
            return [0.0] * self.num_requests
        gaps = random.Random(self.seed)
        return list(accumulate(gaps.expovariate(self.rate) for _ in range(self.num_requests)))


@dataclass(frozen=True, slots=True)
class Request:
    """`arrival` is in seconds after the start; only the open loop heeds it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    arrival: float
    ignore_eos: bool = False


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts from a file: Spec-Bench's .jsonl (first turns; `prompt` works too), or plain text, one per line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error})") from error
    if path.suffix != ".jsonl":
        return tuple(lines)
    return tuple(_prompt_of(line, f"{path}, entry {number}") for number, line in enumerate(lines, 1))


def _prompt_of(line: str, place: str) -> str:
    try:
        entry = json.loads(line)
        prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise WorkloadError(f"{place}: neither `turns` nor `prompt` in it") from error
    if not isinstance(prompt, str):
        raise WorkloadError(f"{place}: its prompt is not a string")
    return prompt
