"""Packs matrices for the native functions; matrix.h describes the format.

Shapes: N rows, padded to whole vectors; D their length; R rows of a panel; S steps; G groups; X numbers or bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvium_core.model.quantized import LEAST, GroupKind, Groups

KINDS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2}
GROUP_KINDS: dict[GroupKind, int] = {"q8": 3, "q4": 4, "q4_1": 5, "q4_k": 6, "q6_k": 7}  # `Format` of matrix.h


class Packed(NamedTuple):
    """`Matrix` of matrix.h. `data` is None if the model has no such matrix."""

    kind: int
    data: Tensor | None


NOTHING = Packed(0, None)


class Layout(NamedTuple):
    """Number of lanes per vector, and of vectors per panel."""

    lanes: int
    panel_vectors: int

    @classmethod
    def of(cls, vector_bytes: int, dtype: torch.dtype) -> "Layout":
        """`dtype`: the precision of sums, float32 or float64."""
        return cls(vector_bytes // dtype.itemsize, 4 if dtype == torch.float32 else 1)


def pack(weight_ND: Tensor, layout: Layout) -> Packed:
    """Pack a matrix. For bfloat16 a step is two numbers, which are copied as one int32."""
    step = 2 if weight_ND.dtype == torch.bfloat16 else 1
    missing = -weight_ND.shape[1] % step, -weight_ND.shape[0] % layout.lanes
    if any(missing):
        weight_ND = pad(weight_ND, (0, missing[0], 0, missing[1]))
    steps_NS = weight_ND.contiguous().view(torch.int32) if step == 2 else weight_ND
    num_rows, num_steps = layout.panel_vectors * layout.lanes, steps_NS.shape[1]
    packed = torch.empty(steps_NS.numel(), dtype=steps_NS.dtype)
    panels = packed.split(num_rows * num_steps)
    for panel, rows_RS in zip(panels, steps_NS.split(num_rows), strict=True):
        panel.view(num_steps, -1).copy_(rows_RS.T)
    return Packed(KINDS[weight_ND.dtype], packed.view(weight_ND.dtype))


def pack_groups(groups: Groups, layout: Layout) -> Packed:
    """Pack a quantized matrix. A panel's group has the scales of all lanes, the minima if any, then the numbers."""
    numbers_NGX = groups.numbers_by_group()
    if groups.kind in LEAST:
        low, high = (numbers_NGX - LEAST[groups.kind]).to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
        numbers_NGX = low | high << 4
    minima = [] if groups.minima_NG is None else [groups.minima_NG[..., None]]
    parts = [_panel_bytes(part, layout) for part in (groups.scales_NG[..., None], *minima, numbers_NGX)]
    panels = [torch.cat(panel, 1).flatten() for panel in zip(*parts, strict=True)]
    return Packed(GROUP_KINDS[groups.kind], torch.cat(panels))


def _panel_bytes(groups_NGX: Tensor, layout: Layout) -> list[Tensor]:
    """Return the bytes of each panel, [G, bytes], with the lanes interleaved."""
    padded_NGX = pad(groups_NGX, (0, 0, 0, 0, 0, -len(groups_NGX) % layout.lanes))
    panels = padded_NGX.split(layout.panel_vectors * layout.lanes)
    return [panel_NGX.permute(1, 2, 0).contiguous().flatten(1).view(torch.uint8) for panel_NGX in panels]
