"""Memory put by, and given back once there is no other, so that what is under way can still be told how it ended."""

import mmap
from contextlib import suppress

NUM_BYTES = 16 * 2**20


class MemoryReserve:
    """Counts against bounds on a process's memory, but takes none, as nothing is ever written there."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        self._num_bytes = num_bytes
        self._pages: mmap.mmap | None = None

    def take(self) -> None:
        """Unless it has been taken, or there is too little."""
        if self._pages is None:
            with suppress(OSError, MemoryError):
                self._pages = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def note(self, error: object) -> None:
        """Give it back if this error says that there is no more memory."""
        if isinstance(error, MemoryError):
            self.give_back()


memory_reserve = MemoryReserve()
"""Of this process."""
