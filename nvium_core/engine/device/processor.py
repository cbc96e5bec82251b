"""What all engines of this process may use of its processor."""

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.device import native
from nvium_core.engine.params import thread_count


def use_processor(instructions: Instructions, threads: str) -> None:
    """As the options say. Raises `InvalidRequest` for what cannot be had here."""
    native.limit(instructions)
    use_threads(threads)


def use_threads(threads: str) -> None:
    """So many; auto leaves PyTorch its choice. Raises `InvalidRequest` for what is no number."""
    if count := thread_count(threads):
        torch.set_num_threads(count)


def start_threads() -> None:
    """Those of PyTorch that work for the calling thread. OpenMP would start them with its first large operation, a long
    prompt's for instance, when there may be no memory for them."""
    torch.ones(LARGE * torch.get_num_threads()).sum()


LARGE = 2**17
"""Numbers that a thread does not add up alone."""
