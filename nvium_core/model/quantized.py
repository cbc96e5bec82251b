"""Quantized weights: groups of numbers with a scale, as in GGUF's Q8_0 and Q4_0. Some kinds also have a minimum.

The model computes with the dequantized weights, in float32 or better. A layer also keeps its groups, which native
kernels read instead to save bandwidth. `quantize` is idempotent: it recovers the groups of dequantized Q8_0 and Q4_0
weights.

Shapes: N rows, D row length, G groups, X numbers of a group.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nvium_core.choices import Quantization

GROUP = 32

GroupKind = Literal["q8", "q4", "q4_1", "q4_k", "q6_k"]

LARGEST = {"q8": 127, "q4": -8}  # the number to which a group's largest element is mapped

BOUNDS = {"q8": (-127, 127), "q4": (-8, 7)}

LEAST: dict[GroupKind, int] = {"q4": -8, "q4_1": 0, "q4_k": 0}  # the number that four zero bits represent


@dataclass(frozen=True)
class Groups:
    """weight[n, d] = scale[n, d / X] · number[n, d] + minimum[n, d / X], where X is 32, or 16 for q6_k."""

    kind: GroupKind
    numbers_ND: Tensor
    """int8; −8 to 7 for q4, 0 to 15 for q4_1 and q4_k"""
    scales_NG: Tensor
    """float16, or float32 for q4_k and q6_k"""
    minima_NG: Tensor | None = None
    """like the scales, for q4_1 and q4_k only"""

    def numbers_by_group(self) -> Tensor:
        """Return the numbers as [N, G, X]."""
        return self.numbers_ND.unflatten(1, (self.scales_NG.shape[1], -1))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        weight_NGX = self.numbers_by_group().to(dtype) * self.scales_NG.to(dtype)[..., None]
        if self.minima_NG is not None:
            weight_NGX += self.minima_NG.to(dtype)[..., None]
        return weight_NGX.flatten(1)


def quantize(weight_ND: Tensor, kind: Quantization) -> Groups:
    """Quantize a weight. The scale of a group maps its largest element to `LARGEST`. Other elements are rounded."""
    groups_NGX = weight_ND.detach().double().unflatten(1, (-1, GROUP))
    extreme_NG1 = groups_NGX.gather(-1, groups_NGX.abs().argmax(-1, keepdim=True))
    if kind == "q8":
        extreme_NG1 = extreme_NG1.abs()
    scale_NG1 = (extreme_NG1 / LARGEST[kind]).half()
    numbers_NGX = (groups_NGX / scale_NG1.double()).nan_to_num(0, 0, 0).round().clamp(*BOUNDS[kind])
    return Groups(kind, numbers_NGX.flatten(1).to(torch.int8), scale_NG1[..., 0])


def set_groups(layer: nn.Linear, groups: Groups) -> None:
    """Set the layer's weight to the dequantized groups. Raise `ValueError` if the weight is not float32 or float64."""
    if layer.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{layer.weight.dtype} would round the dequantized weights")
    with torch.no_grad():
        layer.weight.copy_(groups.dequantized(layer.weight.dtype))
    attach_groups(layer, groups)


def attach_groups(layer: nn.Linear, groups: Groups) -> None:
    """Attach groups to a layer whose weight already equals the dequantized groups."""
    layer.groups = groups  # type: ignore[assignment]  # not a parameter


def groups_of(layer: nn.Linear) -> Groups | None:
    """Return the layer's groups. Return None if the layer has no groups, or if its weight has been changed since."""
    groups = getattr(layer, "groups", None)
    weight_ND = layer.weight.detach()
    if isinstance(groups, Groups) and torch.equal(groups.dequantized(weight_ND.dtype).to(weight_ND.device), weight_ND):
        return groups
    return None


def quantize_model(model: nn.Module, kind: Quantization) -> None:
    """Quantize the linear layers of backbone and head whose row length is a multiple of 32."""
    for name, layer in model.named_modules():
        is_weight = name.startswith("model.layers.") or name == "lm_head"
        if isinstance(layer, nn.Linear) and is_weight and layer.in_features % GROUP == 0:
            groups = groups_of(layer)
            set_groups(layer, groups if groups and groups.kind == kind else quantize(layer.weight, kind))
