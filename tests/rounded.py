"""Quantizes models to any kind of groups."""

import torch
from torch import nn

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.quantized import GROUP, GroupKind, Groups, quantize_model, set_groups


def round_to(model: NviumForCausalLM, kind: GroupKind) -> None:
    """Quantize like `quantize_model`, but also to kinds that the product only reads from GGUF files."""
    if kind in ("q8", "q4"):
        quantize_model(model, kind)
        return
    group, lowest, highest = (16, -32, 31) if kind == "q6_k" else (GROUP, 0, 15)
    precision = torch.float16 if kind == "q4_1" else torch.float32
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith(("model.layers.", "lm_head")):
            groups_NGX = layer.weight.detach().unflatten(1, (-1, group))
            minima_NG = groups_NGX.amin(-1).to(precision) * (kind != "q6_k")
            scales_NG = ((groups_NGX.abs().amax(-1) - minima_NG) / highest).to(precision)
            numbers_NGX = ((groups_NGX - minima_NG[..., None]) / scales_NG[..., None]).round().clamp(lowest, highest)
            minima = None if kind == "q6_k" else minima_NG
            set_groups(layer, Groups(kind, numbers_NGX.flatten(1).char(), scales_NG, minima))
