"""A simulated asynchronous device that executes queued operators only when the host waits.

CPU tensors represent the device's. Until execution, the result of an operator is NaN or zero. As on a GPU, a copy from
the host reads the host's values at execution, and a non-blocking copy to the host arrives at execution.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from nvium_core.engine.device.graphs.capture import Fence

aten = torch.ops.aten
NEEDS_VALUES = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "item", "__bool__", "__int__", "__float__")}


class LateDevice:
    """A context in which new tensors belong to the device, unless they are given to the host.

    `waits_for_reads` False and `deaf_fences`, indices in the order of creation, remove waits to test their detection.
    """

    def __init__(self, *, waits_for_reads: bool = True, deaf_fences: Sequence[int] = ()) -> None:
        self.waits_for_reads = waits_for_reads
        self._deaf_fences = deaf_fences
        self._num_fences = 0
        self.num_executed = 0
        self._late: dict[int, Tensor] = {}
        """Tensors by address. They stay referenced, so no address is reused."""
        self._queue: deque[Callable[[], None]] = deque()
        self._stack = ExitStack()
        self.takes_all = True

    def __enter__(self) -> "LateDevice":
        self._stack.enter_context(Reads(self))
        self._stack.enter_context(Operators(self))
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stack.close()

    def take(self, *tensors: Tensor) -> None:
        self._late |= {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}

    def give_to_host(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._late.pop(tensor.untyped_storage().data_ptr(), None)

    def has(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self._late

    def queue(self, function: Callable[[], None]) -> None:
        self._queue.append(function)

    @property
    def position(self) -> int:
        return self.num_executed + len(self._queue)

    def execute(self, until: int | None = None) -> None:
        with _disable_current_modes(), torch.inference_mode():
            while self._queue and (until is None or self.num_executed < until):
                self._queue.popleft()()
                self.num_executed += 1

    def fence(self, device: torch.device) -> Fence:
        self._num_fences += 1
        return LateFence(self, is_deaf=self._num_fences - 1 in self._deaf_fences)


class LateFence(Fence):
    def __init__(self, device: LateDevice, *, is_deaf: bool) -> None:
        self._device, self._position, self._is_deaf = device, 0, is_deaf

    def set(self) -> None:
        self._position = self._device.position

    def wait(self) -> None:
        if not self._is_deaf:
            self._device.execute(self._position)


class Reads(TorchFunctionMode):
    """Executes the queue before the host reads a value."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS and self._device.has(args[0]) and self._device.waits_for_reads:
            self._device.execute()
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device, kwargs = self._device, kwargs or {}
        is_late = any(device.has(leaf) for leaf in tree_leaves((args, kwargs)))
        is_copy_to_host = func is aten.copy_.default and not device.has(args[0])
        is_blocking = is_copy_to_host and not (len(args) > 2 and args[2])
        if is_blocking or (func in NEEDS_VALUES and device.waits_for_reads):
            device.execute()
            return func(*args, **kwargs)
        if is_late and func._schema.is_mutable:
            device.queue(lambda: func(*args, **kwargs))
            return args[0]
        out = self._shaped(func, args, kwargs) if is_late else func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not device.has(leaf)]
        if is_late and made:
            for tensor in made:
                tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.zero_()
            device.queue(lambda: fill(made, func(*args, **kwargs)))
        if is_late or device.takes_all:
            device.take(*made)
        return out

    def _shaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator on missing values for its shape, with zeros for indices out of range."""
        try:
            return func(*args, **kwargs)
        except IndexError:
            harmless = [tree_map_only(Tensor, self._without_indices, each) for each in args]
            return func(*harmless, **kwargs)

    def _without_indices(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if tensor.dtype == torch.long and self._device.has(tensor) else tensor


def fill(made: list[Tensor], out: Any) -> None:
    for tensor, value in zip(made, (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), strict=True):
        tensor.copy_(value)
