"""Compiles the decisions with PyTorch's compiler, which fuses their operators into a few Triton kernels.

`route` is compiled for each pass and `emit` for all passes, each for one row and for any larger number of rows.
"""

import logging
import time
from collections.abc import Callable, Hashable
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
