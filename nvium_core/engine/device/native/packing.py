"""Matrices as the native functions read them: matrix.h says how they lie.

Shapes: N rows, padded to whole vectors; D their length; P panels of K vectors of L lanes; S steps; G groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvium_core.model.quantized import GROUP, Groups

GROUP_KINDS: dict[str, int] = {"q8": 3, "q4": 4}
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
    """Of a precision of `KINDS`."""
    step = 2 if weight_ND.dtype == torch.bfloat16 else 1
    filled_ND = pad(weight_ND, (0, -weight_ND.shape[1] % step))
    return Packed(KINDS[weight_ND.dtype], _panels(filled_ND.unflatten(1, (-1, step)), layout))


def pack_groups(groups: Groups, layout: Layout) -> Packed:
    """Of each panel, group by group: the scales of all its lanes, and then their numbers."""
    numbers_NGX = groups.numbers_ND.unflatten(1, (-1, GROUP))
    if groups.kind == "q4":
        low, high = (numbers_NGX + 8).to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
        numbers_NGX = low | high << 4
    scales = _grouped_panels(groups.scales_NG[..., None], layout)
    numbers = _grouped_panels(numbers_NGX, layout)
    both = (torch.cat(pair, 1).flatten() for pair in zip(scales, numbers, strict=True))
    return Packed(GROUP_KINDS[groups.kind], torch.cat(list(both)))


def _grouped_panels(groups_NGX: Tensor, layout: Layout) -> list[Tensor]:
    """Each panel's bytes by group, within it step by step for all lanes, [G, bytes]."""
    filled_NGX = pad(groups_NGX, (0, 0, 0, 0, 0, -len(groups_NGX) % layout.lanes))
    panels = filled_NGX.split(layout.across * layout.lanes)
    return [panel_NGX.permute(1, 2, 0).contiguous().flatten(1).view(torch.uint8) for panel_NGX in panels]


def _panels(steps_NSX: Tensor, layout: Layout) -> Tensor:
    """What belongs to each step of each row, so that the steps of a panel's vectors take turns."""
    filled_NSX = pad(steps_NSX, (0, 0, 0, 0, 0, -len(steps_NSX) % layout.lanes))
    vectors_VLSX = filled_NSX.unflatten(0, (-1, layout.lanes))
    panels = vectors_VLSX.split(layout.across)
    return torch.cat([panel_KLSX.permute(2, 0, 1, 3).flatten() for panel_KLSX in panels])
