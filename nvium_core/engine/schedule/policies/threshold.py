"""Gather before going deep: a block is run once enough sequences wait for it, else the first block is.

After DREX (arXiv 2512.15705), which holds sequences back at an exit until running them pays.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.policies.policy import Policy, deepest


class Threshold(Policy):
    """The deepest block k > 0 for which at least θ_k sequences wait; else block 0, else the deepest waited for."""

    def __init__(self, thresholds: Items[int]) -> None:
        """θ_k for every block; the first one's is not looked at."""
        self.thresholds = tuple(thresholds)

    @classmethod
    def untuned(cls, num_blocks: int, num_sequences: int) -> "Threshold":
        """A quarter of the sequences at every block: near the best for sixteen, within a few percent elsewhere."""
        return cls([max(1, num_sequences // 4)] * num_blocks)

    def choose(self, num_waiting: Items[int]) -> int:
        for block in range(len(num_waiting) - 1, 0, -1):
            if num_waiting[block] >= self.thresholds[block]:
                return block
        return 0 if num_waiting[0] else deepest(num_waiting)
