"""Make glibc keep freed memory in the process.

By default glibc returns a freed large tensor's memory to the kernel, which then zeroes the same pages again in every
step. On a CPU that is an eighth of a small model's training time.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed memory, for the whole process. Return False if the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
