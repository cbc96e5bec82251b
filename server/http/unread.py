"""Limits the bytes that wait in this process until slow clients read them."""

from collections import defaultdict
from typing import Protocol


class Reader(Protocol):
    @property
    def key(self) -> str:
        """The id of the client's API key."""

    @property
    def num_unread(self) -> int:
        """Bytes of the response that the client has not read."""

    def cut_off(self) -> None: ...


class UnreadBytes:
    """The connections whose clients read slower than the server writes, with at most `max_bytes` together.

    Beyond the limit, the key with the most unread bytes loses the connection that has been slow for the longest time. A
    lone response may be larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._slow: dict[Reader, int] = {}
        """Unread bytes when the connection became slow, the slowest first."""
        self._most = 0
        """Sum of these bytes. The clients may have read some of them since."""

    def add(self, reader: Reader) -> None:
        self.remove(reader)
        self._slow[reader] = reader.num_unread
        self._most += self._slow[reader]
        while self._most > self._max_bytes and len(self._slow) > 1:
            self._slow = {each: each.num_unread for each in self._slow}
            self._most = sum(self._slow.values())
            if self._most > self._max_bytes:
                slowest = self._of_largest_key()
                self.remove(slowest)
                slowest.cut_off()

    def remove(self, reader: Reader) -> None:
        self._most -= self._slow.pop(reader, 0)

    def _of_largest_key(self) -> Reader:
        totals = defaultdict[str, int](int)
        for reader, num_unread in self._slow.items():
            totals[reader.key] += num_unread
        largest = max(totals, key=totals.__getitem__)
        return next(reader for reader in self._slow if reader.key == largest)
