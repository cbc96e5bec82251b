"""Jobs done one after another on a daemon thread that lives as long as there are any."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """The newest job first. A job that raises is logged and forgotten."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
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
        while thread := self._thread:
            thread.join()

    def _work(self) -> None:
        while job := self._next():
            try:
                job()
            except Exception:
                logger.exception("a policy could not be solved; thresholds are used instead")

    def _next(self) -> Job | None:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return None
            return self._jobs.pop()
