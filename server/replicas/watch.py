"""Finds replicas that do not answer by probing each directly. Knows neither Ray nor what requests mean."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from server.replicas.routing import Address

PERIOD_SECONDS = 1
"""Between probes of a replica."""

ANSWER_SECONDS = 2
"""Timeout of a probe."""

MAX_MISSES = 30
"""In a row, after which a replica has been replaced and is no longer probed."""


class Watch:
    """`ask` probes a replica; `on_silence` is called with the name of one that has just missed a probe."""

    def __init__(self, ask: Callable[[Address], Awaitable[object]], on_silence: Callable[[str], None]) -> None:
        self._ask = ask
        self._on_silence = on_silence
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.silent: set[str] = set()
        """Replicas that missed their last probe."""

    def follow(self, address: Address) -> None:
        """Probe this replica too from now on. Called on the event loop."""
        if address.name not in self._tasks:
            self._tasks[address.name] = task = asyncio.create_task(self._follow(address))
            task.add_done_callback(report_failure)

    def note_silence(self, name: str) -> None:
        """Exclude a replica until it answers again."""
        if name in self._tasks:
            self.silent.add(name)
            self._on_silence(name)

    @property
    def others_answer(self) -> bool:
        """At least one probed replica answers."""
        return self._tasks.keys() > self.silent

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, address: Address) -> None:
        num_misses = 0
        while num_misses < MAX_MISSES:
            await asyncio.sleep(PERIOD_SECONDS)
            if await self._answers(address):
                num_misses = 0
                self.silent.discard(address.name)
            else:
                num_misses += 1
                self.note_silence(address.name)
        self.silent.discard(address.name)
        del self._tasks[address.name]

    async def _answers(self, address: Address) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._ask(address)
        except (aiohttp.ClientError, OSError):  # `TimeoutError` among them
            return False
        return True


def report_failure(task: asyncio.Task[None]) -> None:
    """Report a task's exception to the event loop, which does not see it while the task is referenced."""
    if not task.cancelled() and (error := task.exception()):
        task.get_loop().call_exception_handler({"message": "a task has failed", "exception": error, "task": task})
