"""The interface of contenders, and what disturbed their turns. A contender is an engine that runs a model.

A contender generates the same number of tokens for every sequence, and ignores end-of-text. By default it samples at
temperature 1, without top-k or top-p. Other programs or other virtual machines may disturb a turn.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from nvium_core.bench.figures import Figures
from nvium_core.engine.device import processor
from nvium_core.engine.device.native.library import native_library
from nvium_core.errors import NviumError

QUIET_SHARE = 0.01  # maximum share of a quiet turn's time that is stolen, or in which the thread pool runs alone


class NotAvailable(NviumError, RuntimeError):
    """A contender cannot run here. The message says why."""


class ContenderFailed(NviumError, RuntimeError):
    """A contender failed during a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a contender must generate: `num_tokens` tokens for each sequence, all with the same prompt."""

    prompt: list[int]
    num_sequences: int
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Length of a finished sequence, prompt included."""
        return len(self.prompt) + self.num_tokens

    def seeds(self, turn: int) -> range:
        """Return one seed per sequence. Different turns have different seeds."""
        return range(turn * self.num_sequences, (turn + 1) * self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The result of a turn. Each list has one entry per sequence. Times are in seconds since the turn's start.

    stolen_seconds, alone_seconds: what disturbed the turn, see `interference`.
    """

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    exits: list[list[int]] = field(default_factory=list)
    stolen_seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


Contender = Callable[[int], Generation]
"""Runs a workload once. Such a run is a *turn*. The argument is the turn's number."""


def watched(contender: Contender) -> Contender:
    """Record in each generation what disturbed it."""

    def generate(turn: int) -> Generation:
        stolen, alone = stolen_seconds(), alone_seconds()
        generation = contender(turn)
        return replace(generation, stolen_seconds=stolen_seconds() - stolen, alone_seconds=alone_seconds() - alone)

    return generate


def stolen_seconds() -> float:
    """Return the time for which virtual CPUs were ready but the host ran something else, summed over the CPUs."""
    ticks = int(Path("/proc/stat").read_text(encoding="ascii").split()[8])
    return ticks / os.sysconf("SC_CLK_TCK")


def alone_seconds() -> float:
    """Return how long callers of the kernels' thread pool have run alone, because its other threads were held up."""
    library = native_library(processor.instructions())
    return library.alone_nanoseconds() / 1e9 if library else 0.0


def states(turns: Sequence[Generation], speeds: Sequence[float]) -> Figures:
    """Return what disturbed each turn, and the median speeds of quiet and of disturbed turns if there are any."""
    by_state: dict[str, list[float]] = {"quiet": [], "disturbed": []}
    for turn, speed in zip(turns, speeds, strict=True):
        stolen_share = turn.stolen_seconds / (os.cpu_count() or 1) / turn.seconds
        is_quiet = max(stolen_share, turn.alone_seconds / turn.seconds) <= QUIET_SHARE
        by_state["quiet" if is_quiet else "disturbed"].append(speed)
    return {
        "stolen_seconds": [turn.stolen_seconds for turn in turns],
        "alone_seconds": [turn.alone_seconds for turn in turns],
        "states": {
            name: {"turns": len(found), "tokens_per_second": median(found)} for name, found in by_state.items() if found
        },
    }
