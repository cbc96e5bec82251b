"""Jobs done one after another on a daemon thread."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

SHARE = 0.05
"""Of a core, that jobs take in the long run."""

Job = Callable[[], None]
Jobs = queue.LifoQueue[Job | None]


class Background:
    """The newest job first. A job that raises is logged and forgotten.

    Between jobs the thread sleeps, so that serving is hardly affected, unless wait() is called. It ends with its owner.
    """

    def __init__(self) -> None:
        self._jobs: Jobs = queue.LifoQueue()
        self._is_awaited = threading.Event()
        mine = self._jobs, self._is_awaited
        threading.Thread(target=work_on, args=mine, name="policy-solver", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def is_idle(self) -> bool:
        return not self._jobs.unfinished_tasks

    def do(self, job: Job) -> None:
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when nothing is left to do."""
        self._is_awaited.set()
        self._jobs.join()
        self._is_awaited.clear()


def work_on(jobs: Jobs, is_awaited: threading.Event) -> None:
    while job := jobs.get():
        started = time.thread_time()
        try:
            job()
        except Exception:
            logger.exception("a policy could not be solved; thresholds are used instead")
        jobs.task_done()
        is_awaited.wait((time.thread_time() - started) * (1 / SHARE - 1))
