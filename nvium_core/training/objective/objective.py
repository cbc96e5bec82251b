"""What every training method computes from a batch: the scalar to minimise, and figures for the log.

Knows neither models nor losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from nvium_core.training.data.windows import Batch


@dataclass(frozen=True)
class Phase:
    """Where a run stands: steps done, their share of all, and the weights α of L_balance and β of L_compute.

    α and β are 0-dimensional tensors, so that a compiled objective is not recompiled when they change.
    """

    step: int
    progress: float
    alpha: Tensor
    beta: Tensor


class ObjectiveResult(NamedTuple):
    """The mean loss over a batch's counted targets, and figures for the log, detached means too.

    Every method has `mix_loss`, the mean −log probability of the target under the distribution it samples from.
    """

    loss: Tensor
    figures: dict[str, Tensor]


ObjectiveFunction = Callable[[Any, Batch, Phase], ObjectiveResult]
"""(model, batch, phase) → result."""


class Objective(nn.Module):
    """A model and its objective as one module whose forward is a whole pass: what DDP and FSDP wrap."""

    def __init__(self, model: nn.Module, function: ObjectiveFunction) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, batch: Batch, phase: Phase) -> ObjectiveResult:
        return self.function(self.model, batch, phase)


def counted_mean(value_BT: Tensor, batch: Batch) -> Tensor:
    """The mean over the counted targets; value [B, T, …] may have further dimensions, which stay."""
    counted_BT = batch.counted.to(value_BT.dtype)
    weights = counted_BT.view(*counted_BT.shape, *(1 for _ in value_BT.shape[2:]))
    return (value_BT * weights).sum((0, 1)) / counted_BT.sum().clamp_min(1)
