"""A run's folder, which belongs to one run at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvium_core.training.errors import TrainingError


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out while it lasts. Raises `TrainingError` if it cannot be had."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written ({error})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainingError(f"{folder}: another run is using it") from error
        yield
