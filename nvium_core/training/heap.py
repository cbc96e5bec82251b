"""Make glibc keep freed memory in the process.

By default glibc returns the memory of large tensors to the kernel, which zeroes the same pages again in every step. On
a CPU this takes an eighth of a small model's training time.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed memory, for the whole process. Return False if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
