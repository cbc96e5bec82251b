"""The policies: which blocks a row passes before its next token is decided. Torch-free."""

from collections.abc import Callable
from typing import NamedTuple

from nvium_core.choices import Schedule


class Policy(NamedTuple):
    """`passes` cuts consecutive blocks into passes. After each pass, front rows may emit their tokens."""

    name: Schedule
    passes: Callable[[range], list[range]]


WHOLE = Policy("whole", lambda blocks: [blocks])
"""Runs all blocks for every row."""

SWEEP = Policy("sweep", lambda blocks: [range(block, block + 1) for block in blocks])
"""The paper's loop with batching: runs the deepest block for which enough sequences wait, also for deferred rows."""

RACED: dict[Schedule, tuple[Policy, ...]] = {"race": (WHOLE, SWEEP), "whole": (WHOLE,), "sweep": (SWEEP,)}
"""The policies that each schedule compares, the baseline first."""


def policies_of(schedule: Schedule, num_blocks: int) -> tuple[Policy, ...]:
    return RACED[schedule] if num_blocks > 1 else (WHOLE,)
