"""Everybody's row through all blocks at once, where that emits more tokens per second than any staircase."""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.policies.policy import Policy, deepest


class WholePass(Policy):
    """Rows that a staircase has left behind go first."""

    def passes_whole(self, num_sequences: int) -> bool:
        return True

    def choose(self, num_waiting: Items[int]) -> int:
        return deepest(num_waiting)
