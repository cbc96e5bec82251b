"""Quantizes models to any type of GGUF."""

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.stored import StoredMatrix
from tests.model.gguf_files import blocks

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def round_to(model: NviumForCausalLM, kind: str) -> None:
    """Store the matrices of backbone and head in blocks. Those that the library cannot quantize are random."""
    for name, layer in model.named_modules():
        is_whole = isinstance(layer, nn.Linear) and layer.in_features % gguf.GGML_QUANT_SIZES[Kind[kind]][0] == 0
        if is_whole and name.startswith(("model.layers.", "lm_head")):
            stored = torch.from_numpy(blocks(layer.weight.detach().float().numpy(), Kind[kind], 2e-5))
            layer.weight = nn.Parameter(StoredMatrix(stored, Kind[kind], layer.weight.dtype), requires_grad=False)
