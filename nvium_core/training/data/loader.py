"""Prepares batches ahead on a thread, so that the device never waits."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterable[Item], num_ahead: int = 2) -> Iterator[Item]:
    """The same items in the same order, up to `num_ahead` prepared in advance. Exceptions are raised in their item's
    turn."""
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        ahead: deque[Future[list[Item]]] = deque(thread.submit(next_one, source) for _ in range(num_ahead))
        while item := ahead.popleft().result():
            ahead.append(thread.submit(next_one, source))
            yield item[0]


def next_one(source: Iterator[Item]) -> list[Item]:
    """The next item, or nothing."""
    return list(islice(source, 1))
