"""Threads and vector instructions of this process."""

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.device import native
from nvium_core.engine.params import thread_count


def use_processor(instructions: Instructions, threads: str) -> None:
    """Apply the options. Raises `InvalidRequest` for instructions or threads that this machine lacks."""
    native.limit(instructions)
    use_threads(threads)


def use_threads(threads: str) -> None:
    """Set the number of threads; `auto` keeps PyTorch's. Raises `InvalidRequest` for text that is no number."""
    if count := thread_count(threads):
        torch.set_num_threads(count)
