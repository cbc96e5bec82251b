"""Jobs done one after another on a daemon thread that lives as long as there are any."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

SHARE = 0.05
"""Of a core, that jobs take in the long run."""

Job = Callable[[], None]


class Background:
    """The newest job first. A job that raises is logged and forgotten.

    Between jobs the thread sleeps, so that serving is hardly affected, unless wait() is called.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._is_awaited = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="policy-solver", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when nothing is left to do."""
        self._is_awaited.set()
        while thread := self._thread:
            thread.join()
        self._is_awaited.clear()

    def _work(self) -> None:
        while job := self._next():
            started = time.thread_time()
            try:
                job()
            except Exception:
                logger.exception("a policy could not be solved; thresholds are used instead")
            self._is_awaited.wait((time.thread_time() - started) * (1 / SHARE - 1))

    def _next(self) -> Job | None:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return None
            return self._jobs.pop()
