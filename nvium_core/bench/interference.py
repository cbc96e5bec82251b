"""Detects turns that other programs or other virtual machines disturbed."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from nvium_core.bench.contenders.contender import Contender, Generation
from nvium_core.bench.figures import Figures
from nvium_core.engine.device import processor
from nvium_core.engine.device.native.library import native_library

QUIET_SHARE = 0.01  # maximum share of a quiet turn's time that is stolen, or in which the thread pool runs alone


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


def is_disturbed(turn: Generation) -> bool:
    stolen_share = turn.stolen_seconds / (os.cpu_count() or 1) / turn.seconds
    return max(stolen_share, turn.alone_seconds / turn.seconds) > QUIET_SHARE


def states(turns: Sequence[Generation], speeds: Sequence[float]) -> Figures:
    """Return what disturbed each turn, and the median speeds of quiet and of disturbed turns if there are any."""
    by_state: dict[str, list[float]] = {"quiet": [], "disturbed": []}
    for turn, speed in zip(turns, speeds, strict=True):
        by_state["disturbed" if is_disturbed(turn) else "quiet"].append(speed)
    return {
        "stolen_seconds": [turn.stolen_seconds for turn in turns],
        "alone_seconds": [turn.alone_seconds for turn in turns],
        "states": {
            name: {"turns": len(found), "tokens_per_second": median(found)} for name, found in by_state.items() if found
        },
    }
