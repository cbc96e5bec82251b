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
