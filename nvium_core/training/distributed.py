"""The processes of a run that torchrun started. Each trains on its share of every step's windows.

A run with one process uses no collective operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(hours=2)
"""Timeout of collective operations. Other processes wait this long while the first process tokenizes a large text."""


@dataclass(frozen=True)
class Processes:
    """A process's rank, and the number of processes. The first process, of rank 0, writes files and prints."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """Replace a value by its sum over all processes, and return it."""
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


ALONE = Processes()


@contextmanager
def joined_processes(device: str) -> Iterator[Processes]:
    """Under torchrun, join the process group; the process with local rank n uses GPU n. Else yield a lone process."""
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    gpu = torch.device("cuda", dist.get_node_local_rank()) if device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def is_first_here() -> bool:
    """Return True in the first process of each machine."""
    return dist.get_node_local_rank(fallback_rank=0) == 0
