"""Prepare batches ahead on a thread, so the device never waits for data."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterable[Item], num_ahead: int = 2) -> Iterator[Item]:
    """Yield the items in order. A thread computes up to `num_ahead` items in advance."""
    source = iter(items)

    def next_item() -> list[Item]:
        return list(islice(source, 1))

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        ahead: deque[Future[list[Item]]] = deque(thread.submit(next_item) for _ in range(num_ahead))
        while item := ahead.popleft().result():
            ahead.append(thread.submit(next_item))
            yield item[0]
