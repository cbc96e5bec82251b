"""Matrices as the native functions read them: matrix.h says how they lie.

Shapes: N rows, padded to whole vectors; D their length; R rows of a panel; S steps; G groups; X numbers or bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvium_core.model.quantized import GROUP, LEAST, Groups

GROUP_KINDS: dict[str, int] = {"q8": 3, "q4": 4, "q4_1": 5}
KINDS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2}
"""As in matrix.h, with groups and without."""


class Packed(NamedTuple):
    """A matrix of matrix.h; None where there is none."""

    kind: int
    data: Tensor | None


NOTHING = Packed(0, None)


class Layout(NamedTuple):
    """Of sums of this precision in one build."""

    lanes: int
    across: int

    @classmethod
    def of(cls, vector_bytes: int, dtype: torch.dtype) -> "Layout":
        precise = torch.promote_types(dtype, torch.float32)
        return cls(vector_bytes // precise.itemsize, 4 if precise == torch.float32 else 1)


def pack(weight_ND: Tensor, layout: Layout) -> Packed:
    """Of a precision of `KINDS`. A step of bfloat16 is two numbers, moved as one."""
    step = 2 if weight_ND.dtype == torch.bfloat16 else 1
    missing = -weight_ND.shape[1] % step, -weight_ND.shape[0] % layout.lanes
    if any(missing):
        weight_ND = pad(weight_ND, (0, missing[0], 0, missing[1]))
    steps_NS = weight_ND.contiguous().view(torch.int32) if step == 2 else weight_ND
    return Packed(KINDS[weight_ND.dtype], _panels(steps_NS, layout).view(weight_ND.dtype))


def pack_groups(groups: Groups, layout: Layout) -> Packed:
    """Of each panel, group by group: the scales of all its lanes, then their minima if they have some, then numbers."""
    numbers_NGX = groups.numbers_ND.unflatten(1, (-1, GROUP))
    if groups.kind != "q8":
        low, high = (numbers_NGX - LEAST[groups.kind]).to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
        numbers_NGX = low | high << 4
    minima = [] if groups.minima_NG is None else [groups.minima_NG[..., None]]
    parts = [_grouped_panels(part, layout) for part in (groups.scales_NG[..., None], *minima, numbers_NGX)]
    panels = [torch.cat(panel, 1).flatten() for panel in zip(*parts, strict=True)]
    return Packed(GROUP_KINDS[groups.kind], torch.cat(panels))


def _grouped_panels(groups_NGX: Tensor, layout: Layout) -> list[Tensor]:
    """Each panel's bytes by group, within it step by step for all lanes, [G, bytes]."""
    filled_NGX = pad(groups_NGX, (0, 0, 0, 0, 0, -len(groups_NGX) % layout.lanes))
    panels = filled_NGX.split(layout.across * layout.lanes)
    return [panel_NGX.permute(1, 2, 0).contiguous().flatten(1).view(torch.uint8) for panel_NGX in panels]


def _panels(steps_NS: Tensor, layout: Layout) -> Tensor:
    """The steps of a panel's rows take turns."""
    num_rows, num_steps = layout.across * layout.lanes, steps_NS.shape[1]
    packed = torch.empty(steps_NS.numel(), dtype=steps_NS.dtype)
    places = packed.split(num_rows * num_steps)
    for place, panel_RS in zip(places, steps_NS.split(num_rows), strict=True):
        place.view(num_steps, -1).copy_(panel_RS.T)
    return packed
