"""Quantizes models to any type of GGUF, with the rounding of the native products.

Shapes: X any number of dimensions, D row length.
"""

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.stored import StoredMatrix
from tests.model.gguf_files import blocks

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def rounded(x_XD: Tensor) -> Tensor:
    """Round each group of 32 numbers to multiples of 1/32,639 of its largest, like rounded.h."""
    x_XGN = x_XD.unflatten(-1, (-1, 32))
    peak_XG1 = x_XGN.abs().amax(-1, keepdim=True)
    factor_XG1 = torch.where(peak_XG1 <= 1e-30, 0, 32639 / peak_XG1)
    return ((x_XGN.double() * factor_XG1).round() * (peak_XG1 / 32639)).to(x_XD.dtype).flatten(-2)


def round_to(model: NviumForCausalLM, kind: str) -> None:
    """Store the matrices of backbone and head in blocks, and let PyTorch's layers round their inputs like rounded.h.
    Matrices that the library cannot quantize are random."""
    for name, layer in model.named_modules():
        is_whole = isinstance(layer, nn.Linear) and layer.in_features % gguf.GGML_QUANT_SIZES[Kind[kind]][0] == 0
        if is_whole and name.startswith(("model.layers.", "lm_head")):
            stored = torch.from_numpy(blocks(layer.weight.detach().float().numpy(), Kind[kind], 2e-5))
            layer.weight = nn.Parameter(StoredMatrix(stored, Kind[kind], layer.weight.dtype), requires_grad=False)
            layer.register_forward_pre_hook(lambda _, inputs: tuple(map(rounded, inputs)))
