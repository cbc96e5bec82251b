"""Random numbers of the engine. A number depends only on what it decides, not on the time or the batch.

The numbers come from Philox4x64-10 (Salmon et al. 2011), keyed by seed and choice: block (position + 1, exit, 0, 0) has
the numbers for drawing a token and for routing. The C++ is native/randomness.h.
"""

import secrets
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Purpose = Literal[b"route", b"token"]
ROUTE: Purpose = b"route"
TOKEN: Purpose = b"token"
PURPOSES: tuple[Purpose, ...] = (TOKEN, ROUTE)

BLOCK_NUMBERS = 4
POSITIONS_AHEAD = 64


def uniform(seed: int, choice: int, position: int, junction: int, purpose: Purpose) -> float:
    """Return a number in [0, 1) with 53 random bits.

    `position` is the front row, `junction` the 0-based exit. Routing and drawing a token use different numbers:
    otherwise exit and token would be correlated, and samples would be biased.
    """
    return float(blocks(seed, choice, position, junction, 1)[0, PURPOSES.index(purpose)])


def blocks(seed: int, choice: int, position: int, junction: int, count: int) -> NDArray[np.float64]:
    """Return the numbers of `count` positions from `position` on, [count, 4]."""
    key = np.array([seed % 2**64, choice], np.uint64)
    philox = np.random.Philox(counter=[position, junction, 0, 0], key=key)
    return np.random.Generator(philox).random((count, BLOCK_NUMBERS))


class Uniforms:
    """The random numbers of one sequence, which are generated for `POSITIONS_AHEAD` positions at once."""

    def __init__(self, seed: int, choice: int, num_exits: int) -> None:
        self._key = seed, choice
        self._num_exits = num_exits
        self._first = -1
        self._rows: list[bytes] = []

    def at(self, position: int) -> bytes:
        """Return the numbers at a position, float64 [2, N]: for drawing a token at each exit, then for routing."""
        first = position - position % POSITIONS_AHEAD
        if first != self._first:
            found = [blocks(*self._key, first, exit_, POSITIONS_AHEAD) for exit_ in range(self._num_exits)]
            number_T2N = np.stack(found, -1)[:, : len(PURPOSES)]
            self._first, self._rows = first, [row.tobytes() for row in number_T2N]
        return self._rows[position - first]


def random_seed() -> int:
    return secrets.randbits(63)
