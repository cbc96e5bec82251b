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

DRAFT_VOCABULARY = 8_192
"""Tokens that a draft is chosen among, where there are more: the first, which tokenizers have learnt first because they
are frequent. The race between these is that between all, so what is drafted of them is as right as ever."""


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
        self._shape, self._draft_shape = ExitShape.of(model), ExitShape.of(model)
        self._draft_shape.vocab_size = min(self._shape.vocab_size, DRAFT_VOCABULARY)

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
        if any(draw.is_adjusted for draw in draws):
            logits_RV = self.logits(block, x_FD[torch.tensor(rows)]).double()
            adjust(logits_RV, sequences)
            return draw_tokens(self._library, logits_RV, draws, uniforms)
        return self._sampled(self._shape, block, x_FD, rows, packed(draws, uniforms))

    @property
    def draft_share(self) -> float:
        return self._draft_shape.vocab_size / self._shape.vocab_size

    def draft(self, block: int, x_FD: Tensor, sequences: Items[Sequence], uniforms: Items[float]) -> list[int]:
        """Of the first tokens of the vocabulary."""
        asked = packed([sequence.draw for sequence in sequences], uniforms)
        return self._sampled(self._draft_shape, block, x_FD, range(len(sequences)), asked)

    def _sampled(
        self, shape: ExitShape, block: int, x_FD: Tensor, rows: Items[int], asked: "array[float]"
    ) -> list[int]:
        own_rows, tokens, threads = array("q", rows), array("q", bytes(8 * len(rows))), self._threads.of(len(rows))
        of_exit = ctypes.byref(shape), self._weights[block].array
        self._sample(*of_exit, x_FD.data_ptr(), address(own_rows), len(rows), address(asked), address(tokens), threads)
        return tokens.tolist()

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        """Of normed rows, [R, V], float32 or better."""
        logits_RV = x_RD.new_empty(len(x_RD), self._shape.vocab_size)
        self._logits(*self._of(block), x_RD.data_ptr(), logits_RV.data_ptr(), len(x_RD), self._threads.of(len(x_RD)))
        return logits_RV

    def _of(self, block: int) -> tuple[object, object]:
        return ctypes.byref(self._shape), self._weights[block].array
