"""Quantizes models to any kind of groups."""

from torch import nn

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.quantized import GROUP, GroupKind, Groups, quantize_model, set_groups


def round_to(model: NviumForCausalLM, kind: GroupKind) -> None:
    """Quantize like `quantize_model`, but also to q4_1, which the product only reads from GGUF files."""
    if kind != "q4_1":
        quantize_model(model, kind)
        return
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith(("model.layers.", "lm_head")):
            groups_NGX = layer.weight.detach().unflatten(1, (-1, GROUP))
            minima_NG = groups_NGX.amin(-1).half()
            scales_NG = ((groups_NGX.amax(-1) - minima_NG) / 15).half()
            numbers_NGX = ((groups_NGX - minima_NG[..., None]) / scales_NG[..., None]).round().clamp(0, 15)
            set_groups(layer, Groups(kind, numbers_NGX.flatten(1).char(), scales_NG, minima_NG))
