"""Sets this process's CPU threads and vector instructions."""

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.config import thread_count
from nvium_core.engine.device import native


def use_processor(instructions: Instructions, threads: str) -> None:
    """Raise `InvalidRequest` if this CPU lacks the instructions or `threads` is invalid."""
    native.limit(instructions)
    use_threads(threads)


def use_threads(threads: str) -> None:
    """Set PyTorch's number of threads, unless it is `auto`. Raise `InvalidRequest` if the text is not a number."""
    if count := thread_count(threads):
        torch.set_num_threads(count)
