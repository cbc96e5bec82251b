"""Scores of rows that have passed every block, in one native call: all their exits share the head."""

import ctypes
from array import array
from collections.abc import Sequence as Items

from torch import Tensor

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.native.weights import ExitShape, Pointers, address
from nvium_core.engine.events import Score
from nvium_core.model.nvium import NviumForCausalLM


class NativeScores(ctypes.Structure):
    """`Scores` of score.h."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("slots", "targets")),
        ("num_top", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logprobs", "top_tokens", "top_logprobs", "exit_probabilities")),
    )


class NativeScorer:
    """Over the states behind every block. Only for a model that `is_plain`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: NviumForCausalLM,
        states_NSD: Tensor,
        weights: Items[Pointers],
        threads: Threads | None = None,
    ) -> None:
        self._score = getattr(library, f"score_{PRECISIONS[model.lm_head.weight.dtype]}")
        self._threads = threads or Threads.all()
        self._states, self._weights = states_NSD, weights
        self._exits = (ctypes.c_void_p * len(weights))(*(ctypes.addressof(exit_.array) for exit_ in weights))
        self._shape = ExitShape.of(model)

    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        count, most = len(slots), min(max(num_top), self._shape.vocab_size)
        own_slots, own_targets = array("q", slots), array("q", targets)
        logprobs, top_logprobs = array("d", bytes(8 * count)), array("d", bytes(8 * count * most))
        top_tokens = array("q", bytes(8 * count * most))
        num_exits, num_slots = self._states.shape[:2]
        p = array("d", bytes(8 * count * num_exits))
        native = NativeScores(
            count,
            address(own_slots),
            address(own_targets),
            most,
            address(logprobs),
            address(top_tokens),
            address(top_logprobs),
            address(p),
        )
        self._score(
            ctypes.byref(self._shape),
            self._exits,
            num_exits,
            self._states.data_ptr(),
            num_slots,
            ctypes.byref(native),
            self._threads.of(count),
        )
        top = list(zip(top_tokens, top_logprobs, strict=True))
        return [
            Score(
                logprob,
                tuple(top[row * most : row * most + min(own, most)]),
                tuple(p[row * num_exits : (row + 1) * num_exits]),
            )
            for row, (logprob, own) in enumerate(zip(logprobs, num_top, strict=True))
        ]
