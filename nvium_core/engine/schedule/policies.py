"""The policies: which blocks a row passes before its next token is decided. Torch-free."""

from collections.abc import Callable
from typing import NamedTuple

from nvium_core.choices import Schedule
from nvium_core.engine.schedule.sequence import Sequence


class Policy(NamedTuple):
    """`passes` cuts consecutive blocks into passes. After each pass, front rows may emit their tokens.

    `ready_block`: (sequence, whether others wait for its pages) → the first block of the pass that it waits for.
    `runs_ahead`: whether a Step, always of all blocks, may be scheduled before the last one's outcomes are known.
    """

    name: Schedule
    passes: Callable[[range], list[range]]
    ready_block: Callable[[Sequence, bool], int]
    runs_ahead: bool


WHOLE = Policy("whole", lambda blocks: [blocks], lambda sequence, is_leader: 0, runs_ahead=True)
"""Runs all blocks for every row."""

SWEEP = Policy(
    "sweep",
    lambda blocks: [range(block, block + 1) for block in blocks],
    lambda sequence, is_leader: sequence.deepest_pending_block if is_leader else sequence.ready_block,
    runs_ahead=False,
)
"""The paper's loop with batching: runs the deepest block for which enough sequences wait, also for deferred rows."""

RACED: dict[Schedule, tuple[Policy, ...]] = {"race": (WHOLE, SWEEP), "whole": (WHOLE,), "sweep": (SWEEP,)}
"""The policies that each schedule compares, the baseline first."""


def policies_of(schedule: Schedule, num_blocks: int) -> tuple[Policy, ...]:
    return RACED[schedule] if num_blocks > 1 else (WHOLE,)
