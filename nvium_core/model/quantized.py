"""Weights in groups of 32 with a scale each, as GGUF's Q8_0 and Q4_0, or a scale and a minimum, as its Q4_1.

The model served is exactly the one with dequantised weights: a layer's weight is dequantised, in float32 or better, and
its groups are kept beside it for code that can read fewer bytes. Groups read from a file are passed to `hold`, and
nothing is rounded twice; `quantize` recovers the groups of Q8_0 and Q4_0 from weights that were dequantised from them.

Shapes: N rows, D their length, G groups.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nvium_core.choices import Quantization

GROUP = 32

GroupKind = Literal["q8", "q4", "q4_1"]

LARGEST = {"q8": 127, "q4": -8}
"""The number that a group's largest element becomes."""

BOUNDS = {"q8": (-127, 127), "q4": (-8, 7)}

LEAST: dict[GroupKind, int] = {"q4": -8, "q4_1": 0}
"""Value of four zero bits."""


@dataclass(frozen=True)
class Groups:
    """weight[n, d] = scale[n, d / 32] · number[n, d] + minimum[n, d / 32]."""

    kind: GroupKind
    numbers_ND: Tensor
    """int8; q4 uses −8 to 7 and q4_1 0 to 15."""
    scales_NG: Tensor
    """float16"""
    minima_NG: Tensor | None = None
    """float16, for q4_1 only"""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers_NGX = self.numbers_ND.to(dtype).unflatten(1, (-1, GROUP))
        weight_NGX = numbers_NGX * self.scales_NG.to(dtype)[..., None]
        if self.minima_NG is not None:
            weight_NGX += self.minima_NG.to(dtype)[..., None]
        return weight_NGX.flatten(1)


def quantize(weight_ND: Tensor, kind: Quantization) -> Groups:
    """Round to the nearest numbers; each group's scale maps its largest element to `LARGEST`."""
    groups_NGX = weight_ND.detach().double().unflatten(1, (-1, GROUP))
    extreme_NG1 = groups_NGX.gather(-1, groups_NGX.abs().argmax(-1, keepdim=True))
    if kind == "q8":
        extreme_NG1 = extreme_NG1.abs()
    scale_NG1 = (extreme_NG1 / LARGEST[kind]).half()
    numbers_NGX = (groups_NGX / scale_NG1.double()).nan_to_num(0, 0, 0).round().clamp(*BOUNDS[kind])
    return Groups(kind, numbers_NGX.flatten(1).to(torch.int8), scale_NG1[..., 0])


def hold(layer: nn.Linear, groups: Groups) -> None:
    """Set the layer's weights. Raises `ValueError` if its precision cannot hold them."""
    if layer.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dequantised weights have more digits than {layer.weight.dtype} holds; use float32")
    with torch.no_grad():
        layer.weight.copy_(groups.dequantized(layer.weight.dtype))
    remember(layer, groups)


def remember(layer: nn.Linear, groups: Groups) -> None:
    """Attach groups to a layer whose weights equal them."""
    layer.groups = groups  # type: ignore[assignment]  # a plain attribute, no parameter


def groups_of(layer: nn.Linear) -> Groups | None:
    """The layer's groups, unless its weight has changed since."""
    groups = getattr(layer, "groups", None)
    weight_ND = layer.weight.detach()
    if isinstance(groups, Groups) and torch.equal(groups.dequantized(weight_ND.dtype).to(weight_ND.device), weight_ND):
        return groups
    return None


def quantize_model(model: nn.Module, kind: Quantization) -> None:
    """Quantize backbone and head where rows are whole groups, but not routers, adapters and norms. A tied embedding is
    quantized with the head."""
    for name, layer in model.named_modules():
        is_quantized = isinstance(layer, nn.Linear) and (name.startswith("model.layers.") or name == "lm_head")
        if is_quantized and isinstance(layer, nn.Linear) and layer.in_features % GROUP == 0:
            hold(layer, groups_of_kind(layer, kind))


def groups_of_kind(layer: nn.Linear, kind: Quantization) -> Groups:
    """The layer's groups, or its weight rounded."""
    held = groups_of(layer)
    return held if held is not None and held.kind == kind else quantize(layer.weight, kind)
