"""Bytes as a source of chance, so that a fuzzer that changes them steers whatever is made at random."""

import random

from typing_extensions import override


class Choices(random.Random):
    """Draws from the bytes, and what always comes once they are used up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._place = data, 0

    @override
    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        taken = self._data[self._place : self._place + size]
        self._place += size
        return int.from_bytes(taken, "little") & ((1 << k) - 1) if taken else super().getrandbits(k)

    @override
    def random(self) -> float:
        return self.getrandbits(16) / 2**16

    @property
    def rest(self) -> bytes:
        """What has not been drawn yet."""
        return self._data[self._place :]
