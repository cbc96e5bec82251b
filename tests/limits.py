"""Simulates a full disk, and a machine without memory, for this process."""

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nvium_core.text.sandbox import size_of


def no_file_larger_than(num_bytes: int) -> AbstractContextManager[None]:
    """Let writes beyond this size fail, as on a full disk."""
    return limited(resource.RLIMIT_FSIZE, num_bytes)


def no_more_memory_than(num_bytes: int) -> AbstractContextManager[None]:
    """Let this process allocate this many more bytes."""
    return limited(resource.RLIMIT_AS, size_of("self") + num_bytes)


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
