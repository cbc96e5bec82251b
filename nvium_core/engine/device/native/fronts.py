"""An exit for a few fronts, in two native calls: routes, and tokens for those that exit."""

import ctypes
from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.device.native.draw import draw_tokens, packed
from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.native.weights import ExitShape, Pointers, Store, address
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.nvium import NviumForCausalLM


class NativeFronts:
    """Only for a model that `is_plain`. `weights` are those of its exits, if they are stored already."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: NviumForCausalLM,
        states_NSD: Tensor,
        weights: Items[Pointers] | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._library = library
        self._threads = threads or Threads.all()
        dtype = model.lm_head.weight.dtype
        precision, names = PRECISIONS[dtype], ("route", "logits", "sample")
        self._route, self._logits, self._sample = (getattr(library, f"{name}_{precision}") for name in names)
        self._precise = torch.promote_types(dtype, torch.float32)
        self._weights = weights or Store(model, library.vector_bytes()).exits()
        self._states = Pointers(list(states_NSD))
        self._shape = ExitShape.of(model)

    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        """In float32 or better."""
        count, log_w, threads = len(slots), array("d", bytes(16 * len(slots))), self._threads.of(len(slots))
        x_FD = torch.empty(count, self._shape.width, dtype=self._precise)
        own_slots, states = array("q", slots), self._states.array[block]
        self._route(*self._of(block), states, address(own_slots), count, x_FD.data_ptr(), address(log_w), threads)
        return x_FD, [[log_w[2 * row], log_w[2 * row + 1]] for row in range(count)]

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        draws = [sequence.draw for sequence in sequences]
        if any(draw.is_ranked or draw.is_adjusted for draw in draws):
            logits_RV = self.logits(block, x_FD[torch.tensor(rows)]).double()
            adjust(logits_RV, sequences)
            return draw_tokens(self._library, logits_RV, draws, uniforms)
        asked, own_rows, tokens = packed(draws, uniforms), array("q", rows), array("q", bytes(8 * len(rows)))
        of_rows = x_FD.data_ptr(), address(own_rows), len(rows)
        self._sample(*self._of(block), *of_rows, address(asked), address(tokens), self._threads.of(len(rows)))
        return tokens.tolist()

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        """Of normed rows, [R, V], float32 or better."""
        logits_RV = x_RD.new_empty(len(x_RD), self._shape.vocab_size)
        self._logits(*self._of(block), x_RD.data_ptr(), logits_RV.data_ptr(), len(x_RD), self._threads.of(len(x_RD)))
        return logits_RV

    def _of(self, block: int) -> tuple[object, object]:
        return ctypes.byref(self._shape), self._weights[block].array
