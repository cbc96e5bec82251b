"""The paper's loop, batched: whoever is deepest first, deferred rows ride along."""

from collections.abc import Sequence as Counts

from nvium_core.engine.policies.policy import Policy, deepest
from nvium_core.engine.sequence import Sequence


class Sweep(Policy):
    def ready_block(self, sequence: Sequence) -> int:
        return sequence.front_block

    def choose(self, num_waiting: Counts[int]) -> int:
        return deepest(num_waiting)
