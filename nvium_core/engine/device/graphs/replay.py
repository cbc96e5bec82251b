"""Functions of tensors that never move: captured once as CUDA graphs, replayed from then on; elsewhere just called."""

import logging
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 2

Graph = tuple[Hashable, Callable[[], None]]
"""A name, and what is captured under it."""


class Replay:
    """All graphs share one pool of memory, so nothing may be read of a function but what it leaves in its tensors.

    A function is run several times when it is first met, so running it again must change nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """None for what could not be captured."""
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Where functions are warmed up and captured. PyTorch keeps what is freed on a stream for that stream, so one
        for each would hold the memory of all warm-ups."""

    @property
    def captures(self) -> bool:
        return self._pool is not None

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        """Run the function. The same name must always come with the same function."""
        if self._pool is None:
            return called(function)
        if name not in self.graphs:
            self.graphs[name] = self._captured(name, function)
        graph = self.graphs[name]
        return called(function) if graph is None else graph.replay()

    def _captured(self, name: Hashable, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """None, and a warning, for what cannot be captured; then nothing is replayed any more."""
        here, aside = torch.cuda.current_stream(self._device), self._aside
        assert aside is not None
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(NUM_WARM_UPS):
                called(function)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                called(function)
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # a capture that fails to end leaves the thread on the capture's stream
            logger.warning("%s cannot be a CUDA graph, so nothing is replayed: %s", name, error)
            self._pool = None
            return None
        return graph


@torch.inference_mode()
def called(function: Callable[[], None]) -> None:
    """A replay needs no such mode, and entering it takes longer than what surrounds a replay."""
    function()
