"""Tokens drawn in one native call, where no row has to be sorted for it."""

import math
from array import array
from collections.abc import Sequence as Items

from torch import Tensor

from nvium_core.engine import sampling
from nvium_core.engine.native.blocks import address
from nvium_core.engine.native.library import native_library
from nvium_core.engine.params import SamplingParams


def draw_tokens(logits_RV: Tensor, params: Items[SamplingParams], uniforms: Items[float]) -> list[int]:
    """As `sampling.draw_tokens`, on the CPU."""
    if any(p.is_greedy or p.top_k or p.top_p < 1 for p in params):
        return sampling.draw_tokens(logits_RV, params, uniforms)
    library = native_library()
    assert library is not None
    logits_RV = logits_RV.contiguous()
    temperatures = array("d", [p.temperature for p in params])
    log_min_ps = array("d", [math.log(p.min_p) if p.min_p else -math.inf for p in params])
    tokens, uniform = array("q", bytes(8 * len(params))), array("d", uniforms)
    arrays = (temperatures, log_min_ps, uniform, tokens)
    library.draw(logits_RV.data_ptr(), *logits_RV.shape, *(address(numbers) for numbers in arrays))
    return tokens.tolist()
