"""Large pieces of CPU memory. NumPy asks the system for huge pages, so that reads miss the TLB less often."""

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
PIECE_BYTES = 32 << 20


def zeros(num_bytes: int) -> Tensor:
    """Return zero bytes that start at a cache line. Unlike PyTorch's zeros, they take memory only when written."""
    piece = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, np.uint8))
    start = -piece.data_ptr() % CACHE_LINE
    return piece[start : start + num_bytes]


class Arena:
    def __init__(self) -> None:
        self._free = zeros(0)

    def zeros(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if len(self._free) < size:
            self._free = zeros(max(size, PIECE_BYTES))
        own, self._free = self._free[:num_bytes], self._free[size:]
        return own
