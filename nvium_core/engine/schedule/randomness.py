"""Random numbers of the engine. A number depends only on what it decides, not on the time or the batch.

The numbers come from Philox4x64-10 (Salmon et al. 2011), keyed by seed and choice: block (position + 1, exit, 0, 0) has
the numbers for drawing a token and for routing. The C++ is native/draw.h.
"""

import secrets

import numpy as np

BLOCK_NUMBERS = 4
USED_NUMBERS = 2
"""Numbers in use: for drawing a token and for routing. One number for both would correlate exit and token."""

POSITIONS_AHEAD = 64


class Uniforms:
    """The random numbers of one sequence, which are generated for `POSITIONS_AHEAD` positions at once."""

    def __init__(self, seed: int, choice: int, num_exits: int) -> None:
        self._key = np.array([seed % 2**64, choice], np.uint64)
        self._num_exits = num_exits
        self._first = -1
        self._rows: list[bytes] = []

    def at(self, position: int) -> bytes:
        """Return numbers in [0, 1) of a position, float64 [2, N]: for drawing a token at each exit, and for routing."""
        first = position - position % POSITIONS_AHEAD
        if first != self._first:
            streams = [
                np.random.Philox(counter=[first, exit_, 0, 0], key=self._key) for exit_ in range(self._num_exits)
            ]
            found = [np.random.Generator(stream).random((POSITIONS_AHEAD, BLOCK_NUMBERS)) for stream in streams]
            self._first, self._rows = first, [row.tobytes() for row in np.stack(found, -1)[:, :USED_NUMBERS]]
        return self._rows[position - first]


def random_seed() -> int:
    return secrets.randbits(63)
