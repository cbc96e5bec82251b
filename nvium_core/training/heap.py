"""Keeps the memory of a step's tensors in the process, on a CPU.

By default glibc returns a large tensor's memory to the kernel when it is freed, so every step has the same pages zeroed
again: an eighth of a small model's time.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc, for the whole process, not to return memory; returns whether there is a glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
