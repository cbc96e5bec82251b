"""The linear map that brings an exit's rows nearest to the last exit's, and an adapter that is this map.

An untrained exit says nothing: a middle layer's rows mean little to the head. One linear map, without a gradient, makes
most of the way. An adapter can hold it, because SiLU(z) − SiLU(−z) = z: a pair of units is exactly linear.

Shapes: R rows, D width, A the adapter's inner width.
"""

import torch
from torch import Tensor

from nvium_core.model.exits import Adapter

RIDGE = 1e-4
"""Of the mean square of the rows, added to the diagonal."""


class RowFit:
    """min over M of Σ |x M − y|², from rows that come in parts."""

    def __init__(self, width: int) -> None:
        self._xx_DD = torch.zeros(width, width, dtype=torch.float64)
        self._xy_DD = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x_RD: Tensor, y_RD: Tensor) -> None:
        self._xx_DD += (x_RD.T @ x_RD).double()
        self._xy_DD += (x_RD.T @ y_RD).double()

    def solve(self) -> Tensor:
        """M [D, D], float64."""
        ridge = RIDGE * self._xx_DD.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        return torch.linalg.solve(self._xx_DD + ridge * torch.eye(len(self._xx_DD)), self._xy_DD)


@torch.no_grad()
def hold_map(adapter: Adapter, map_DD: Tensor) -> None:
    """Make x + down(SiLU(up(x))) the map x M; of fewer than 2 D inner units, its best of that rank."""
    rest_DD = map_DD.double() - torch.eye(len(map_DD), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(rest_DD)
    rank = min(len(map_DD), len(adapter.up.weight) // 2)
    root = sizes[:rank].sqrt()
    into, out = (left[:, :rank] * root).T, right[:rank].T * root
    adapter.up.weight.zero_()
    adapter.down.weight.zero_()
    adapter.up.weight[: 2 * rank].copy_(torch.cat([into, -into]))
    adapter.down.weight[:, : 2 * rank].copy_(torch.cat([out, -out], 1))
