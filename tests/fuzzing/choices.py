"""A random generator that draws from bytes, so a fuzzer that changes the bytes steers what is generated."""

import random

from typing_extensions import override


class Choices(random.Random):
    """Draws from the bytes, then from a fixed seed."""

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
