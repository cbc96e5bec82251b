"""Processes of a distributed run: rank, collective operations, and how a model is sharded.

torchrun starts the processes and configures PyTorch. A single process needs none of this.
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

PATIENCE = timedelta(hours=2)
"""How long processes wait for one another, while one tokenizes a file."""


@dataclass(frozen=True)
class Processes:
    """All processes of a run, as seen by one; `device` is its own."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This process's part of range(count); parts are equal. Raises `ValueError` where it does not divide."""
        if count % self.count:
            raise ValueError(f"{count} windows of a step cannot be shared equally by {self.count} processes")
        size = count // self.count
        return range(self.rank * size, (self.rank + 1) * size)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def sum(self, number: int) -> int:
        """The sum of all processes' numbers; all get the same result."""
        return int(self.total(torch.tensor(number, device=self.device)))

    def any(self, wish: bool) -> bool:
        """Whether any process has it."""
        return self.sum(wish) > 0

    def wait(self) -> None:
        """A barrier."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone. `device` becomes the process's current GPU."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP and broadcasts of objects use the current one
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def is_first_here() -> bool:
    """Whether this is the first, or only, process on its machine."""
    return dist.get_node_local_rank(fallback_rank=0) == 0


def own_device(device: torch.device) -> torch.device:
    """This process's device: on a machine with several GPUs, the one of its local rank."""
    if device.type == "cuda" and dist.is_torchelastic_launched():
        return torch.device("cuda", dist.get_node_local_rank())
    return device


def spread(objective: nn.Module, layers: nn.ModuleList, sharding: Sharding, processes: Processes) -> nn.Module:
    """The objective, wrapped so that gradients are means over all processes."""
    if processes.count == 1:
        return objective
    if sharding == "ddp":
        return DistributedDataParallel(objective)
    for layer in layers:
        fully_shard(layer)
    fully_shard(objective)
    return objective


def gradients_shared(module: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Meanwhile, backward passes share their gradients only if `now`."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and not now:
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
