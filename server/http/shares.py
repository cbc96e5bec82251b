"""Shares a resource, such as memory for bodies, among keys. No key can take all of it."""

from collections import defaultdict

MULTIPLE = 3
"""A key may hold at most three times the free capacity. One busy key gets 3/4 of the capacity, two get 3/7 each."""


class Shares:
    """Divides a capacity among keys by dynamic thresholds, as network switches divide their buffers.

    A key that holds nothing may take the whole free capacity. If only one key has ever requested a share, that key may
    always take the whole free capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._held = defaultdict[str, int](int)

    def fits(self, amount: int, key: str, *, held_by_request: int = 0) -> bool:
        """Return whether a key may take `amount` more for a request. Remember that the key has requested a share.

        `held_by_request` is the amount that the request already holds.
        """
        free = self.capacity - self.num_held - amount
        is_first = self._held[key] == held_by_request
        is_alone = len(self._held) == 1
        return free >= 0 and (is_first or is_alone or self._held[key] + amount <= MULTIPLE * free)

    def acquire(self, amount: int, key: str) -> None:
        self.num_held += amount
        self._held[key] += amount

    def give_back(self, amount: int, key: str) -> None:
        self.acquire(-amount, key)
        assert self._held[key] >= 0
