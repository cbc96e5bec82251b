"""The interface of training objectives, which compute a loss and metrics from a batch."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nvium_core.training.data.windows import Batch


@dataclass(frozen=True)
class Phase:
    """The current step, the share of steps done, and the weights α of L_balance and β of L_compute.

    α and β are 0-dimensional tensors, so that a compiled objective is not recompiled when they change.
    """

    step: int
    progress: float
    alpha: Tensor
    beta: Tensor


class ObjectiveResult(NamedTuple):
    """The mean loss over a batch's counted targets, and detached metrics, with the mean −log π_mix as `mix_loss`."""

    loss: Tensor
    metrics: dict[str, Tensor]


def counted_mean(value_BT: Tensor, batch: Batch) -> Tensor:
    """Average a value [B, T, …] over the counted targets. The result keeps the dimensions after T."""
    counted_BT = batch.counted.to(value_BT.dtype)
    weights = counted_BT.view(*counted_BT.shape, *(1 for _ in value_BT.shape[2:]))
    return (value_BT * weights).sum((0, 1)) / counted_BT.sum().clamp_min(1)
