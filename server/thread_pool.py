"""Threads for work that would block the event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreadPool(Executor):
    """A thread pool that reports how long its oldest task has run. The process exits without waiting for tasks."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        self._started_at: dict[int, float] = {}
        """Start time of each running task by thread, on the `time.monotonic()` clock."""
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, partial(task, *args, **kwargs)))
        return future

    async def run(self, task: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self, partial(task, *args))

    @property
    def busy_seconds(self) -> float:
        now = time.monotonic()
        return now - min(list(self._started_at.values()), default=now)

    def _run(self) -> None:
        while True:
            future, task = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._started_at[threading.get_ident()] = time.monotonic()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            self._started_at.pop(threading.get_ident(), None)
            del future, task  # free the request's text before waiting for the next task
