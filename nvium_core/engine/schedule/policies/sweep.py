"""The paper's loop, batched: the deepest block first, deferred rows are piggybacked."""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.policies.policy import Policy, deepest


class Sweep(Policy):
    def choose(self, num_waiting: Items[int]) -> int:
        return deepest(num_waiting)
