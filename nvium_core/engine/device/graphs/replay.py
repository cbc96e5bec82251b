"""Captures functions of fixed tensors as CUDA graphs and replays them. Without CUDA, it calls the functions."""

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 1  # compiles kernels and creates the libraries' handles


class Fence:
    """A position in the device's queue that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Move the fence after all work that is queued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Replay:
    """Captures and replays CUDA graphs.

    Functions must be idempotent, because warm-ups run them several times. They must write results to fixed tensors,
    because all graphs share one memory pool: a replay may overwrite whatever another graph has allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """Captured graphs by name. After a failed capture the value is None, and `run` calls the function itself."""
        self.captures = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        self._stream = torch.cuda.Stream(device) if self.captures else None
        """One stream for all warm-ups and captures, because PyTorch caches memory per stream."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Failed graphs. They stay alive, because PyTorch's list of running captures may still point to them."""

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        """Replay the function's graph, after capturing it if needed. A name must always mean the same function."""
        if not self.captures:
            return call(function)
        self.capture(name, function)
        graph = self.graphs[name]
        return call(function) if graph is None else graph.replay()

    def capture(self, name: Hashable, function: Callable[[], None]) -> bool:
        """Capture the function once. A failure is logged and affects no other graph. Return whether it is captured."""
        if name in self.graphs:
            return self.graphs[name] is not None
        graph, current, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device), self._stream
        assert stream is not None
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    call(function)
                self._record(graph, function)
            self.graphs[name] = graph
        except RuntimeError as error:
            logger.warning("cannot capture the CUDA graph %s: %s", name, error)
            self.graphs[name] = None
        current.wait_stream(stream)
        return self.graphs[name] is not None

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        assert self._pool is not None
        torch.cuda.synchronize(self._device)
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            call(function)
            graph.capture_end()
        except RuntimeError:
            self._failed.append(graph)
            with suppress(RuntimeError):
                graph.capture_end()
            with suppress(RuntimeError):  # raises if capture_end() has already ended the allocation
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001
            raise


@torch.inference_mode()
def call(function: Callable[[], None]) -> None:
    """Call a function in inference mode. Replays skip this, because entering the mode takes longer than a replay."""
    function()
