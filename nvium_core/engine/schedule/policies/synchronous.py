"""The dense schedule: a token's row passes every block before the next token begins. Same distribution, no gain.

The baseline of every speed claim.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.policies.policy import Policy, deepest
from nvium_core.engine.schedule.sequence import Sequence


class Synchronous(Policy):
    def ready_block(self, sequence: Sequence) -> int:
        return sequence.deepest_pending_block

    def passes_whole(self, num_sequences: int) -> bool:
        return True

    def choose(self, num_waiting: Items[int]) -> int:
        return deepest(num_waiting)
