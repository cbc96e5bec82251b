"""Jobs done one after another on a daemon thread."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

logger = logging.getLogger(__name__)

SHARE = 0.05
"""Of a core, that jobs take in the long run."""

POLL_SECONDS = 0.001

Job = Callable[[], None]


@dataclass
class Work:
    """What the thread knows. `calls` has True for each job, and False to end."""

    jobs: deque[Job] = field(default_factory=deque)
    calls: "SimpleQueue[bool]" = field(default_factory=SimpleQueue)
    is_busy: bool = False
    is_awaited: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Safe wherever the garbage collector calls it."""
        self.jobs.clear()
        self.calls.put(False)

    def run(self) -> None:
        while self.calls.get():
            started = time.thread_time()
            self.is_busy = True  # before the job is taken, so that it is always seen
            try:
                if self.jobs:
                    self.jobs.pop()()
            except Exception:
                logger.exception("a policy could not be solved; thresholds are used instead")
            finally:
                self.is_busy = False
            self.is_awaited.wait((time.thread_time() - started) * (1 / SHARE - 1))


class Background:
    """The newest job first. A job that raises is logged and forgotten.

    Between jobs the thread sleeps, so that serving is hardly affected, unless wait() is called. It runs from the
    beginning, since one that is started without memory may hang its starter, and ends with its owner.
    """

    def __init__(self) -> None:
        self._work = Work()
        threading.Thread(target=self._work.run, name="policy-solver", daemon=True).start()
        weakref.finalize(self, self._work.end).atexit = False

    @property
    def is_idle(self) -> bool:
        return not self._work.jobs and not self._work.is_busy

    def do(self, job: Job) -> None:
        self._work.jobs.append(job)
        self._work.calls.put(True)

    def wait(self) -> None:
        """Return when nothing is left to do."""
        self._work.is_awaited.set()
        while not self.is_idle:
            time.sleep(POLL_SECONDS)
        self._work.is_awaited.clear()
