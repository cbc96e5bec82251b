"""The random numbers of whole passes, in one native call, or in Python where there is no compiler.

Shapes: N blocks, R rows there is room for.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.schedule.randomness import ROUTE, TOKEN, Purpose, uniform


class Uniforms:
    """Of rows whose seeds, choices and positions are in `key_R3`."""

    def __init__(self, library: ctypes.CDLL | None, out_XR: NDArray[np.float64]) -> None:
        """They are written to `out_XR`, [2N, R]: for tokens drawn behind each block, then for routing there."""
        self._library = library
        self._out_XR = out_XR
        self.key_R3 = np.zeros((out_XR.shape[1], 3), np.int64)
        self._addresses = self.key_R3.ctypes.data, out_XR.ctypes.data
        purposes: tuple[Purpose, ...] = TOKEN, ROUTE
        self._order = [(block, purpose) for purpose in purposes for block in range(len(out_XR) // 2)]

    def write(self, num_rows: int) -> None:
        """For the first rows."""
        keys, out = self._addresses
        if self._library is not None:
            self._library.uniforms(keys, num_rows, len(self._order) // 2, out, self._out_XR.shape[1])
        else:
            for row, (seed, choice, position) in enumerate(self.key_R3[:num_rows].tolist()):
                self._out_XR[:, row] = [uniform(seed, choice, position, *each) for each in self._order]
