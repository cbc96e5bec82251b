"""Functions of tensors that never move: captured once as CUDA graphs, then replayed; called where there is no CUDA."""

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 2


class Fence:
    """A place in the device's queue that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Move the fence behind all that is queued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached the fence."""
        if self._event is not None:
            self._event.synchronize()


class Replay:
    """All graphs share one memory pool, so read nothing of a function but what it leaves in its fixed tensors.

    Warm-ups run a function several times, so running it again must change nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """None after a failed capture: the function is called instead."""
        self.captures = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        self._aside = torch.cuda.Stream(device) if self.captures else None
        """The stream of all warm-ups and captures, since PyTorch keeps freed memory per stream."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept alive, because PyTorch's list of running captures may still point to them."""

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        """Run the function. A name must always come with the same function."""
        if not self.captures:
            return called(function)
        self.capture(name, function)
        graph = self.graphs[name]
        return called(function) if graph is None else graph.replay()

    def capture(self, name: Hashable, function: Callable[[], None]) -> None:
        """Capture the function unless it has been. A failure is logged with its cause and affects no other graph."""
        if name in self.graphs:
            return
        graph, here, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device), self._aside
        assert aside is not None
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                for _ in range(NUM_WARM_UPS):
                    called(function)
                self._record(graph, function)
            self.graphs[name] = graph
        except RuntimeError as error:
            logger.warning("cannot capture the CUDA graph %s: %s", name, error)
            self.graphs[name] = None
        here.wait_stream(aside)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        assert self._pool is not None
        torch.cuda.synchronize(self._device)
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            called(function)
            graph.capture_end()
        except RuntimeError:
            self._failed.append(graph)
            with suppress(RuntimeError):
                graph.capture_end()
            with suppress(RuntimeError):  # it has ended, unless capture_end() raised first
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001
            raise


@torch.inference_mode()
def called(function: Callable[[], None]) -> None:
    """Entering inference mode takes longer than a replay, which needs none."""
    function()
