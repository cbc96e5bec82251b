"""The random numbers of whole passes, in one native call, or in Python where there is no compiler.

Shapes: N blocks, R rows there is room for.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.schedule.randomness import ROUTE, TOKEN, Purpose, uniform


class Uniforms:
    """Of rows whose seeds and choices are in `key_R2`, and whose positions in `position_R`, which is the caller's."""

    def __init__(self, library: ctypes.CDLL | None, position_R: NDArray[np.int64], out_XR: NDArray[np.float64]) -> None:
        """They are written to `out_XR`, [2N, R]: for tokens drawn behind each block, then for routing there."""
        self._library = library
        self._out_XR = out_XR
        self._position_R = position_R
        self.key_R2 = np.zeros((out_XR.shape[1], 2), np.int64)
        self._from = self.key_R2.ctypes.data, position_R.ctypes.data
        self._to = out_XR.shape[0] // 2, out_XR.ctypes.data, out_XR.shape[1]
        purposes: tuple[Purpose, ...] = TOKEN, ROUTE
        self._order = [(block, purpose) for purpose in purposes for block in range(len(out_XR) // 2)]

    def write(self, num_rows: int) -> None:
        """For the first rows."""
        if self._library is not None:
            self._library.uniforms(*self._from, num_rows, *self._to)
        else:
            keys = zip(self.key_R2[:num_rows].tolist(), self._position_R[:num_rows].tolist(), strict=True)
            for row, ((seed, choice), position) in enumerate(keys):
                self._out_XR[:, row] = [uniform(seed, choice, position, *each) for each in self._order]
