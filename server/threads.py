"""Threads that do jobs for the event loop.

All run from the beginning: `Thread.start` waits for the new thread, for ever if that finds no memory to begin with
(https://github.com/python/cpython/issues/140746). An executor's threads start with its first jobs, and end where a
result cannot be handed over.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    on_loss: Callable[[], None]

    def do(self) -> None:
        """`on_loss` is called where nobody can be told what came of it."""
        try:
            if not self.future.cancelled():
                self._tell(*self._outcome())
        except BaseException:
            self.on_loss()

    def _outcome(self) -> tuple[Any, BaseException | None]:
        try:
            return self.work(), None
        except BaseException as error:
            return None, error

    def _tell(self, result: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has closed
            self.future.get_loop().call_soon_threadsafe(settle, self.future, result, error)


class Threads:
    """End with their owner, after the jobs that wait."""

    def __init__(self, number: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        for _ in range(number):
            threading.Thread(target=work_on, args=[self._jobs], name=name, daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False

    async def do(self, work: Callable[[], Result], on_loss: Callable[[], None]) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.put(Job(work, future, on_loss))
        return await future


def work_on(jobs: "SimpleQueue[Job | None]") -> None:
    while job := jobs.get():
        job.do()
        del job  # and what it holds, while there is no other


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Called on the loop. Nobody may wait any more."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
