"""Shares one resource, such as memory for bodies, among keys, so that none can take all of it."""

from collections import defaultdict

MULTIPLE = 3
"""A key may hold this many times what it leaves free: three quarters alone, three sevenths each for two such keys."""


class Shares:
    """A capacity of which each key holds a part, bounded by what is free (the dynamic thresholds of switches' buffers).

    Whoever holds nothing may take all that is free, and so may a key while no other has ever asked.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._held = defaultdict[str, int](int)
        """The amount that each key holds."""

    def fits(self, amount: int, key: str, *, of_request: int = 0) -> bool:
        """Whether a key may take more for a request that holds `of_request` already. From now on the key has asked."""
        free = self.capacity - self.num_held - amount
        is_first = self._held[key] == of_request
        is_alone = len(self._held) == 1
        return free >= 0 and (is_first or is_alone or self._held[key] + amount <= MULTIPLE * free)

    def take(self, amount: int, key: str) -> None:
        self.num_held += amount
        self._held[key] += amount

    def give_back(self, amount: int, key: str) -> None:
        self.take(-amount, key)
        assert self._held[key] >= 0
