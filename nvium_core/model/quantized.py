"""Weights in groups of 32 with one scale each, as GGUF's Q8_0 and Q4_0 have them.

What is served is exactly the model with the dequantised weights: a layer that holds groups has them as its weight, in
float32 or better, and the groups beside it for whoever can read fewer bytes. Whoever has groups already, from a file,
gives them to `hold`, and nothing is rounded a second time; `quantize` finds the groups of Q8_0 and Q4_0 again in
weights that were dequantised from them.

Shapes: N rows, D their length, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvium_core.choices import Quantization

GROUP = 32

LARGEST = {"q8": 127, "q4": -8}
"""What the number of a group that is farthest from zero becomes."""

BOUNDS = {"q8": (-127, 127), "q4": (-8, 7)}


@dataclass(frozen=True)
class Groups:
    """weight[n, d] = scale[n, d / 32] · number[n, d]."""

    kind: Quantization
    numbers_ND: Tensor
    """int8, of which q4 uses −8 to 7."""
    scales_NG: Tensor
    """float16"""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers_NGX = self.numbers_ND.to(dtype).unflatten(1, (-1, GROUP))
        return (numbers_NGX * self.scales_NG.to(dtype)[..., None]).flatten(1)


def quantize(weight_ND: Tensor, kind: Quantization) -> Groups:
    """The nearest numbers, with each group's scale such that its largest is the largest there is."""
    groups_NGX = weight_ND.detach().double().unflatten(1, (-1, GROUP))
    extreme_NG1 = groups_NGX.gather(-1, groups_NGX.abs().argmax(-1, keepdim=True))
    if kind == "q8":
        extreme_NG1 = extreme_NG1.abs()
    scale_NG1 = (extreme_NG1 / LARGEST[kind]).half()
    numbers_NGX = (groups_NGX / scale_NG1.double()).nan_to_num(0, 0, 0).round().clamp(*BOUNDS[kind])
    return Groups(kind, numbers_NGX.flatten(1).to(torch.int8), scale_NG1[..., 0])


def hold(layer: nn.Linear, groups: Groups) -> None:
    """Give the layer these weights. Raises `ValueError` if its precision cannot hold them."""
    if layer.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dequantised weights have more digits than {layer.weight.dtype} holds; use float32")
    with torch.no_grad():
        layer.weight.copy_(groups.dequantized(layer.weight.dtype))
    layer.groups = groups  # type: ignore[assignment]  # a plain attribute, no parameter


def groups_of(layer: nn.Linear) -> Groups | None:
    """What the layer holds, unless its weight has been changed since."""
    groups = getattr(layer, "groups", None)
    weight_ND = layer.weight.detach()
    if isinstance(groups, Groups) and torch.equal(groups.dequantized(weight_ND.dtype).to(weight_ND.device), weight_ND):
        return groups
    return None


def quantize_model(model: nn.Module, kind: Quantization) -> None:
    """Backbone and head, if their rows are whole groups; routers, adapters and norms stay. A head that is tied to the
    embedding takes it along."""
    for name, layer in model.named_modules():
        is_quantized = isinstance(layer, nn.Linear) and (name.startswith("model.layers.") or name == "lm_head")
        if is_quantized and isinstance(layer, nn.Linear) and layer.in_features % GROUP == 0:
            hold(layer, groups_of_kind(layer, kind))


def groups_of_kind(layer: nn.Linear, kind: Quantization) -> Groups:
    """What it holds already, or its weights rounded."""
    held = groups_of(layer)
    return held if held is not None and held.kind == kind else quantize(layer.weight, kind)
