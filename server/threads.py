"""Threads that run before they are needed.

`Thread.start` waits for the new thread, for ever if that finds no memory to begin with
(https://github.com/python/cpython/issues/140746). So nothing starts threads while requests are served.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run, where the executor's own would start with the first jobs."""
    pool, barrier = ThreadPoolExecutor(num_threads, thread_name_prefix=name), Barrier(num_threads)
    list(pool.map(lambda _: barrier.wait(), range(num_threads)))
    return pool
