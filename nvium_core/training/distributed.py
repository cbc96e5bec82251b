"""The processes of a distributed run: ranks, collective operations, DDP and FSDP.

torchrun starts the processes and configures PyTorch. A run with one process uses no collective operations.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvium_core.choices import Sharding

TIMEOUT = timedelta(hours=2)
"""Timeout of collective operations. Other processes wait this long while one process tokenizes a large file."""


@dataclass(frozen=True)
class Processes:
    """A process's rank and device, and the number of processes."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """True in the first process, which writes files and prints."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return this process's slice of range(count). Raise `ValueError` if `count` does not divide evenly."""
        if count % self.count:
            raise ValueError(f"{count} windows per step do not divide evenly among {self.count} processes")
        size = count // self.count
        return range(self.rank * size, (self.rank + 1) * size)

    def total(self, value: Tensor) -> Tensor:
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def sum(self, number: int) -> int:
        return int(self.total(torch.tensor(number, device=self.device)))

    def any(self, flag: bool) -> bool:
        """Return True in every process if the flag is set in any process."""
        return self.sum(flag) > 0

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """Under torchrun, join the process group and make `device` the current GPU. Else yield a single process."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP and object broadcasts use the current device
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def is_first_here() -> bool:
    """Return True in the first process of each machine."""
    return dist.get_node_local_rank(fallback_rank=0) == 0


def own_device(device: torch.device) -> torch.device:
    """Return this process's device. Under torchrun, the process with local rank n uses GPU n."""
    if device.type == "cuda" and dist.is_torchelastic_launched():
        return torch.device("cuda", dist.get_node_local_rank())
    return device


def parallelize(objective: nn.Module, layers: nn.ModuleList, sharding: Sharding, processes: Processes) -> nn.Module:
    """Wrap the objective in DDP or FSDP, which average gradients over all processes."""
    if processes.count == 1:
        return objective
    if sharding == "ddp":
        return DistributedDataParallel(objective)
    for layer in layers:
        fully_shard(layer)
    fully_shard(objective)
    return objective


def gradient_sync(module: object, enabled: bool) -> AbstractContextManager[None]:
    """Return a context for backward passes. Gradients are averaged over processes only if `enabled`."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and not enabled:
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
