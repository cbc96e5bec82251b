"""Tokens drawn in one native call, where no row has to be sorted for it."""

import math
from array import array
from collections.abc import Sequence as Items

from torch import Tensor

from nvium_core.engine.device import sampling
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.device.native.weights import address
from nvium_core.engine.params import SamplingParams


def draw_tokens(logits_RV: Tensor, params: Items[SamplingParams], uniforms: Items[float]) -> list[int]:
    """As `sampling.draw_tokens`, on the CPU."""
    if any(map(has_to_be_sorted, params)):
        return sampling.draw_tokens(logits_RV, params, uniforms)
    library = native_library()
    assert library is not None
    logits_RV, asked, tokens = logits_RV.contiguous(), draws(params, uniforms), array("q", bytes(8 * len(params)))
    library.draw(logits_RV.data_ptr(), *logits_RV.shape, address(asked), address(tokens))
    return tokens.tolist()


def has_to_be_sorted(params: SamplingParams) -> bool:
    return bool(params.is_greedy or params.top_k or params.top_p < 1)


def draws(params: Items[SamplingParams], uniforms: Items[float]) -> "array[float]":
    """As draw.h has them, one after the other."""
    asked = array("d")
    for p, uniform in zip(params, uniforms, strict=True):
        asked.extend((p.temperature, math.log(p.min_p) if p.min_p else -math.inf, uniform))
    return asked
