"""Weights in groups of 32 with one scale each, as GGUF's Q8_0 and Q4_0 have them.

The model served is exactly the one with dequantised weights: a layer's weight is dequantised, in float32 or better, and
its groups are kept beside it for code that can read fewer bytes. Groups read from a file are passed to `hold`, and
nothing is rounded twice; `quantize` recovers the groups of Q8_0 and Q4_0 from weights that were dequantised from them.

Shapes: N rows, D their length, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvium_core.choices import Quantization

GROUP = 32

LARGEST = {"q8": 127, "q4": -8}
"""The number stored for the element farthest from zero."""

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
    """Nearest numbers; each group's scale maps its largest element to `LARGEST`."""
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
    remember(layer, groups)


def remember(layer: nn.Linear, groups: Groups) -> None:
    """Groups of the weights that the layer has."""
    layer.groups = groups  # type: ignore[assignment]  # a plain attribute, no parameter


def groups_of(layer: nn.Linear) -> Groups | None:
    """The layer's groups, unless its weight has changed since."""
    groups = getattr(layer, "groups", None)
    weight_ND = layer.weight.detach()
    if isinstance(groups, Groups) and torch.equal(groups.dequantized(weight_ND.dtype).to(weight_ND.device), weight_ND):
        return groups
    return None


def quantize_model(model: nn.Module, kind: Quantization) -> None:
    """Quantize backbone and head where rows are whole groups; routers, adapters and norms stay. A tied embedding
    changes with the head."""
    for name, layer in model.named_modules():
        is_quantized = isinstance(layer, nn.Linear) and (name.startswith("model.layers.") or name == "lm_head")
        if is_quantized and isinstance(layer, nn.Linear) and layer.in_features % GROUP == 0:
            hold(layer, groups_of_kind(layer, kind))


def groups_of_kind(layer: nn.Linear, kind: Quantization) -> Groups:
    """The layer's groups, or its weight rounded."""
    held = groups_of(layer)
    return held if held is not None and held.kind == kind else quantize(layer.weight, kind)
