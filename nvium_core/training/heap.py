"""Where a step's tensors live on a CPU: in memory that the process keeps.

By default glibc takes a large tensor from the kernel and gives it back when it is freed, so that every step pays for
having the same pages zeroed again: an eighth of a small model's time.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc, for the whole process, not to give memory back; returns whether there is a glibc that does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
