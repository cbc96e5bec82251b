"""The random numbers of whole passes, in one native call, or in Python where there is no compiler."""

import ctypes
from array import array
from collections.abc import Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.device.native.weights import address
from nvium_core.engine.schedule.randomness import ROUTE, TOKEN, uniform

Key = tuple[int, int, int]
"""Seed, choice and position of a row."""


def uniforms(library: ctypes.CDLL | None, keys: Iterable[Key], num_blocks: int) -> NDArray[np.float64]:
    """[2N, R]: for the rows' tokens behind each of N blocks, then for routing there."""
    if library is None:
        rows = list(keys)
        every = [(block, purpose) for purpose in (TOKEN, ROUTE) for block in range(num_blocks)]
        return np.array([[uniform(*key, block, purpose) for key in rows] for block, purpose in every])
    asked = array("q", chain.from_iterable(keys))
    num_rows = len(asked) // 3
    drawn = array("d", bytes(8 * 2 * num_blocks * num_rows))
    library.uniforms(address(asked), num_rows, num_blocks, address(drawn))
    return np.frombuffer(drawn).reshape(2 * num_blocks, num_rows)
