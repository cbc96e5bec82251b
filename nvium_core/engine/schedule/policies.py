"""The policies: which blocks a row passes before its next token is decided. Torch-free."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from nvium_core.choices import Schedule
from nvium_core.engine.schedule.sequence import Sequence


class Policy(NamedTuple):
    """`passes` cuts consecutive blocks into passes. After each pass, front rows may emit their tokens.

    `ready_block`: (sequence, whether others wait for its pages) → the first block of the pass that it waits for.
    `allows_async`: whether a Step, always of all blocks, may be scheduled before the last one's outcomes are known.
    `is_tied`: whether each row passes at most one block of a pass. Then the pass runs all blocks at once.
    """

    name: Schedule
    passes: Callable[[range], list[range]]
    ready_block: Callable[[Sequence, bool], int]
    allows_async: bool
    is_tied: bool = False


WHOLE = Policy("whole", lambda blocks: [blocks], lambda sequence, is_leader: 0, allows_async=True)
"""Runs all blocks for every row."""

SWEEP = Policy(
    "sweep",
    lambda blocks: [range(block, block + 1) for block in blocks],
    lambda sequence, is_leader: sequence.deepest_pending_block if is_leader else sequence.ready_block,
    allows_async=False,
)
"""The paper's loop with batching: runs the deepest block for which enough sequences wait, also for deferred rows."""

TIED = Policy("sweep", lambda blocks: [blocks], lambda sequence, is_leader: 0, allows_async=False, is_tied=True)
"""The sweep of a model whose blocks share their weights: one read of the weights serves rows of every block."""


def likely_fastest(policies: Items[Policy], num_sequences: int) -> int:
    """Return the index of the policy to run before any is measured.

    One sequence gains from reading fewer weights. Several wait for each other's blocks, unless one pass serves all.
    """
    return len(policies) - 1 if num_sequences == 1 or policies[-1].is_tied else 0


def policies_of(schedule: Schedule, num_blocks: int, *, is_tied: bool = False) -> tuple[Policy, ...]:
    """Return the policies that a schedule compares, the baseline first. `is_tied`: blocks share their weights."""
    sweep = TIED if is_tied else SWEEP
    raced: dict[Schedule, tuple[Policy, ...]] = {"race": (WHOLE, sweep), "whole": (WHOLE,), "sweep": (sweep,)}
    return raced[schedule] if num_blocks > 1 else (WHOLE,)
