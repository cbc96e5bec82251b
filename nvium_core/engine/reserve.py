"""Memory put by, and given back once there is no other, so that what is under way can still be told how it ended."""

import mmap
import threading
from contextlib import suppress

NUM_BYTES = 16 * 2**20


class MemoryReserve:
    """Counts against bounds on a process's memory, but takes none, as nothing is written there. Of any thread."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        self._num_bytes = num_bytes
        self._pages: mmap.mmap | None = None
        self._is_spent = False
        self._lock = threading.Lock()

    def take(self) -> None:
        """Unless it has been taken or spent, or there is too little."""
        with self._lock:
            if self._pages is None and not self._is_spent:
                with suppress(OSError, MemoryError):
                    self._pages = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self) -> None:
        with self._lock:
            if self._pages is not None:
                self._pages.close()
                self._pages = None

    def spend(self) -> None:
        """Give it back for good, as the process ends."""
        self._is_spent = True
        self.give_back()

    def note(self, error: object) -> None:
        """Give it back if this error says that there is no more memory."""
        if isinstance(error, MemoryError):
            self.give_back()


memory_reserve = MemoryReserve()
"""Of this process."""
