"""Compiles the decisions with PyTorch's compiler, and captures functions of fixed tensors as CUDA graphs.

The compiler fuses operators into a few Triton kernels. `route` is compiled for each pass and `emit` for all, each for
one row and for any larger number of rows. Without CUDA, captured functions are called.
"""

import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from textwrap import shorten
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from nvium_core.engine.device.decide import emit, route
from nvium_core.engine.device.inputs import InputViews, Variant
from nvium_core.model.nvium import Nvium

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 60.0
"""Time for compiling. Graphs whose decisions are then not compiled capture PyTorch's operators."""

MAX_COMPILED = 512  # kinds of calls of a function

P = ParamSpec("P")
T = TypeVar("T")


class Compiler:
    def __init__(self, until: float | None = None) -> None:
        """`until`: when to stop compiling, by `time.monotonic`. None: nothing is compiled."""
        self.until = until
        self.failed = set[Hashable]()

    def decide(
        self, model: Nvium, states_NSD: Tensor, blocks: range, inputs: InputViews, variant: Variant, *, emits: bool
    ) -> Tensor:
        """Return `decide`'s answers. Without `emits`, no token is drawn, and those of all front rows are `GOES_ON`."""
        code = variant.num_rows == 1, *variant[2:]
        self._mark(variant.num_rows, *inputs.rows.values(), inputs.masks_RM)
        chosen = self._call((route, blocks, code), route, model, states_NSD, blocks, inputs, variant)
        if not emits:
            return chosen.answers_F4.T
        self._mark(variant.num_rows, *chosen[:-1], *chosen.mixed)
        return self._call((emit, code), emit, model, chosen, inputs, variant)

    def _mark(self, num_rows: int, *of_rows: Tensor) -> None:
        """Tell the compiler that the number of rows varies, unless it is one, for which code is compiled anyway."""
        if self.until is not None and num_rows > 1:
            for tensor in of_rows:
                torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001

    def _call(self, kind: Hashable, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call the function, compiled if possible. `kind` tells which code these arguments need."""
        if self.until is None or kind in self.failed:
            return function(*given, **named)
        stance = "default" if time.monotonic() < self.until else "eager_on_recompile"
        limits = {"recompile_limit": MAX_COMPILED, "accumulated_recompile_limit": MAX_COMPILED}
        try:
            with torch.compiler.set_stance(stance), torch._dynamo.config.patch(limits):  # noqa: SLF001
                return compile_once(function)(*given, **named)
        except Exception as error:  # the compiler raises errors of its own and of its backends
            if not self.failed:
                cause = shorten(str(error), 200, placeholder=" …")
                logger.warning("decisions that do not compile run in PyTorch's operators: %s", cause)
            self.failed.add(kind)
            return function(*given, **named)


UNCOMPILED = Compiler()


@cache
def compile_once(function: Callable[P, T]) -> Callable[P, T]:
    return torch.compile(function, fullgraph=True, dynamic=False)


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

    Functions must be idempotent, because a warm-up runs them once more. They must write results to fixed tensors,
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
                call(function)  # compiles kernels and creates the libraries' handles
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
