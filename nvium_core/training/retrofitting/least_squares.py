"""Initialise an adapter with the least-squares map from an exit's hidden states to the last exit's.

A linear map closes most of the gap between a middle layer and the last layer, without gradient steps. An adapter can
represent a linear map exactly: SiLU(z) − SiLU(−z) = z, so two inner units together compute a linear function.

Shapes: R rows, D width.
"""

import torch
from torch import Tensor

from nvium_core.model.exits import Adapter

RIDGE = 1e-4  # ridge penalty, as a share of the rows' mean square


class LeastSquares:
    """Finds the matrix M that minimises Σ |x M − y|² over all added rows."""

    def __init__(self, width: int) -> None:
        self._xx = torch.zeros(width, width, dtype=torch.float64)
        self._xy = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x and y, each [R, D]."""
        self._xx += (x.T @ x).double()
        self._xy += (x.T @ y).double()

    def solve(self) -> Tensor:
        """Return M [D, D] in float64."""
        ridge = RIDGE * self._xx.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        return torch.linalg.solve(self._xx + ridge * torch.eye(len(self._xx)), self._xy)


@torch.no_grad()
def set_map(adapter: Adapter, map_DD: Tensor) -> None:
    """Make the adapter x + down(SiLU(up(x))) equal to x M. With fewer than 2 D inner units, approximate M."""
    up, down = adapter.up, adapter.down
    left, sizes, right = torch.linalg.svd(map_DD.double() - torch.eye(len(map_DD), dtype=torch.float64))
    rank = min(len(sizes), len(up.weight) // 2)
    root = sizes[:rank].sqrt()
    into, out = (left[:, :rank] * root).T, right[:rank].T * root
    up.weight.zero_()
    down.weight.zero_()
    up.weight[: 2 * rank].copy_(torch.cat([into, -into]))
    down.weight[:, : 2 * rank].copy_(torch.cat([out, -out], 1))
