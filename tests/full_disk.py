"""A disk that is full or broken, as far as this process can tell."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """What a full disk does to whoever writes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def break_file(path: Path) -> None:
    """Each write to it is EIO from now on: it is the first page of this process's memory, where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/proc/self/mem")
