"""The linear map that brings an exit's rows nearest to the last exit's, and an adapter that is this map.

A middle layer's rows mean little to the head. One linear map, found without a gradient, closes most of the gap. An
adapter can hold it, because SiLU(z) − SiLU(−z) = z: a pair of units is exactly linear.

Shapes: R rows, D width, A the adapter's inner width.
"""

import torch
from torch import Tensor

from nvium_core.model.exits import Adapter

RIDGE = 1e-4
"""Share of the rows' mean square that is added to the diagonal."""


class RowFit:
    """min over M of Σ |x M − y|², from rows that come in parts."""

    def __init__(self, width: int) -> None:
        self._xx = torch.zeros(width, width, dtype=torch.float64)
        self._xy = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows [R, width] each."""
        self._xx += (x.T @ x).double()
        self._xy += (x.T @ y).double()

    def solve(self) -> Tensor:
        """M [width, width], float64."""
        ridge = RIDGE * self._xx.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        return torch.linalg.solve(self._xx + ridge * torch.eye(len(self._xx)), self._xy)


@torch.no_grad()
def hold_map(adapter: Adapter, map_DD: Tensor) -> None:
    """Make x + down(SiLU(up(x))) the map x M; with fewer than 2 D inner units, the nearest of that rank."""
    up, down = adapter.up, adapter.down
    left, sizes, right = torch.linalg.svd(map_DD.double() - torch.eye(len(map_DD), dtype=torch.float64))
    rank = min(len(sizes), len(up.weight) // 2)
    root = sizes[:rank].sqrt()
    into, out = (left[:, :rank] * root).T, right[:rank].T * root
    up.weight.zero_()
    down.weight.zero_()
    up.weight[: 2 * rank].copy_(torch.cat([into, -into]))
    down.weight[:, : 2 * rank].copy_(torch.cat([out, -out], 1))
