"""Tokens drawn in one native call."""

import ctypes
from array import array
from collections.abc import Sequence as Items

from torch import Tensor

from nvium_core.engine.device.native.weights import address
from nvium_core.engine.params import Draw


def draw_tokens(library: ctypes.CDLL, logits_RV: Tensor, draws: Items[Draw], uniforms: Items[float]) -> list[int]:
    """As `sampling.draw_tokens`, on the CPU."""
    logits_RV, asked, tokens = logits_RV.contiguous(), packed(draws, uniforms), array("q", bytes(8 * len(draws)))
    library.draw(logits_RV.data_ptr(), *logits_RV.shape, address(asked), address(tokens))
    return tokens.tolist()


def packed(draws: Items[Draw], uniforms: Items[float]) -> "array[float]":
    """`Draw` of draw.h for each."""
    asked = array("d")
    for draw, uniform in zip(draws, uniforms, strict=True):
        asked.extend((*draw[:4], uniform, draw.is_original))
    return asked
