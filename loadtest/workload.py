"""The requests of a load test: prompts, sizes, seeds and arrival times.

Closed loop: `concurrency` users send requests. A user sends the next request when the last one has finished.
Open loop: requests arrive as a Poisson process, `rate` per second on average. Arrivals do not wait for the server.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

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
    """An invalid workload. The message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The requests at one level of load.

    rate: requests per second in the open loop; None selects the closed loop.
    first: index of the first request. A request's seed is `seed` plus its index, so workloads can have distinct seeds.
    """

    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    num_requests: int = 32
    max_tokens: int = 64
    concurrency: int = 4
    rate: float | None = None
    temperature: float = 1.0
    seed: int = 0
    first: int = 0
    ignore_eos: bool = False

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"

    def requests(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the time and the fields of each request. If there are fewer prompts than requests, prompts repeat.

        Times are seconds since the start of the run, in order. The closed loop ignores them.
        """
        shared: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        shared |= {"ignore_eos": True} if self.ignore_eos else {}  # not a field of OpenAI's
        arrivals: Iterable[float] = repeat(0.0, self.num_requests)
        if self.rate is not None:
            gaps = random.Random(self.seed)
            arrivals = accumulate(gaps.expovariate(self.rate) for _ in range(self.num_requests))
        for index, arrival in enumerate(arrivals, self.first):
            prompt = self.prompts[index % len(self.prompts)]
            yield arrival, {"prompt": prompt, "seed": self.seed + index, **shared}


def workloads(base: Workload, levels: Iterable[Mapping[str, Any]], warm_up: int) -> list[Workload]:
    """Return a copy of `base` for each level of load. All requests, including warm-ups, have different seeds."""
    each = warm_up + base.num_requests
    return [replace(base, **level, first=k * each + warm_up) for k, level in enumerate(levels)]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read one prompt per line. Raise `WorkloadError` if the file is invalid."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read {path}: {error}") from error
    if prompts := tuple(line for line in lines if line.strip()):
        return prompts
    raise WorkloadError(f"{path}: contains no prompts")
