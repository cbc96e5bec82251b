"""Detects that a client has disconnected."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of the work. If the client disconnects first, cancel the work and return None."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
