"""Threads for work that would block the event loop."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any


class Aside(Executor):
    """Tracks how long its oldest task has run. Unlike a `ThreadPoolExecutor`, it does not wait for endless tasks at
    exit."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        self._begun: dict[int, float] = {}
        """Start time of each running task, by `time.monotonic()`."""
        self._excused_at = 0.0
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[..., Any], /, *given: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(work, *given, **options)))
        return future

    @property
    def seconds(self) -> float:
        """Seconds that the oldest task has run."""
        now = time.monotonic()
        return now - max(self._excused_at, min(list(self._begun.values()), default=now))

    def excuse(self) -> None:
        """Restart the clocks after the process was suspended."""
        self._excused_at = time.monotonic()

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._begun[threading.get_ident()] = time.monotonic()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self._begun.pop(threading.get_ident(), None)
            del future, work  # which hold a request's texts
