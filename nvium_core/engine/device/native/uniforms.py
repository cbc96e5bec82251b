"""Uniform numbers for the fronts of a pass.

Shapes: N blocks, R rows.
"""

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.device.native.instructions import available
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.schedule.randomness import ROUTE, TOKEN, uniform


def write_uniforms(
    key_R2: NDArray[np.int64], position_R: NDArray[np.int64], out_XR: NDArray[np.float64], num_rows: int
) -> None:
    """Write to `out_XR` [2N, R]: uniforms for drawing a token after each block, then for routing after each block.

    Writes the first `num_rows` columns. `key_R2`: seed and choice. Runs in C++, or in Python if there is no compiler.
    """
    num_blocks, library = len(out_XR) // 2, native_library(available()[-1])
    if library is not None:
        keys, positions, out = (array.ctypes.data for array in (key_R2, position_R, out_XR))
        library.uniforms(keys, positions, num_rows, num_blocks, out, out_XR.shape[1])
        return
    order = [(block, purpose) for purpose in (TOKEN, ROUTE) for block in range(num_blocks)]
    for row in range(num_rows):
        seed, choice = key_R2[row].tolist()
        out_XR[:, row] = [uniform(seed, choice, int(position_R[row]), *each) for each in order]
