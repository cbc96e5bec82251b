"""Optimisers, and the schedules of the learning rate, of the router warm-up and of β, the weight of L_compute.

The optimiser is AdamW for all parameters, or Muon for the matrices inside the network and AdamW for the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from nvium_core.model.llama import RMSNorm


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW's and Muon's hyperparameters; the defaults are the paper's.

    `weight_decay` does not apply to norms, biases and embeddings. `muon_rate` 0 disables Muon.
    """

    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    clip_norm: float = 1.0
    muon_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.weight_decay < 0 or self.clip_norm <= 0 or self.muon_rate < 0:
            raise ValueError("weight_decay and muon_rate must not be negative, and clip_norm must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")


def optimizers(model: PreTrainedModel, rate: float, settings: OptimizerSettings) -> list[Optimizer]:
    """Return AdamW, preceded by Muon if `muon_rate` is set. A group's `lr` is its peak learning rate."""
    matrices, rest = split_parameters(model) if settings.muon_rate else ([], list(model.parameters()))
    groups = parameter_groups(model, rest, settings.weight_decay)
    beta1, beta2 = settings.betas
    created: list[Optimizer] = [AdamW(groups, lr=rate, betas=(beta1, beta2), eps=1e-8, fused=True)]
    if matrices:
        created.insert(0, Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay))
    return created


def split_parameters(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters for Muon, and all others.

    Muon gets the matrices of linear layers, except the output head and the routers' heads.
    """
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    matrices: list[Tensor] = [layer.weight for layer in linear if layer.out_features > 2]  # routers' heads have 2
    chosen = {id(matrix) for matrix in matrices}
    return matrices, [parameter for parameter in model.parameters() if id(parameter) not in chosen]


def parameter_groups(model: nn.Module, parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return matrices with weight decay, and biases, norms and embeddings without weight decay, as in the paper."""
    undecayed = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "bias" or isinstance(module, RMSNorm | nn.Embedding)
    }
    return [
        {"params": [p for p in parameters if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in undecayed], "weight_decay": 0.0},
    ]


Kind = Literal["cosine", "wsd"]

MAX_WARMUP_SHARE = 0.8  # of a run whose router warm-up takes `min_steps`
GAIN = 0.05  # gain of the depth controller per step, in runs of at least LONG_RUN steps
SMOOTHING = 0.98  # decay of the depth's moving average per step, in runs of at least LONG_RUN steps
LONG_RUN = 3000  # runs of fewer steps steer faster
MIN_BETA = 1e-3  # of a steered β


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up over the first `warmup` share of the steps, then decay to `final_ratio` of the maximum.

    With `cosine`, the decay starts directly after the warm-up. With `wsd` (warm-up, stable, decay), the rate stays at
    the maximum and decays linearly over the last `decay` share of the steps.
    """

    maximum: float
    warmup: float = 0.01
    final_ratio: float = 0.1
    kind: Kind = "cosine"
    decay: float = 0.1

    def __post_init__(self) -> None:
        if not (self.maximum > 0 and 0 <= self.warmup < 1):
            raise ValueError(f"maximum must be positive, and warmup in [0, 1); got {self.maximum} and {self.warmup}")
        if not (0 <= self.final_ratio <= 1 and 0 < self.decay <= 1):
            raise ValueError(f"final_ratio must be in [0, 1] and decay in (0, 1], got {self.final_ratio}, {self.decay}")

    def share_at(self, progress: float) -> float:
        """Return the rate at `progress` in [0, 1] as a share of the maximum."""
        if progress < self.warmup:
            return progress / self.warmup
        left = min(1.0, (1 - progress) / self.decay)
        if self.kind == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))
        return self.final_ratio + (1 - self.final_ratio) * left


@dataclass(frozen=True, kw_only=True)
class RouterWarmup:
    """In the first `share` of the steps, the loss includes α L_balance. After that, the loss includes β L_compute.

    The warm-up takes at least `min_steps`, or most of a run that is hardly longer. Before that, the first exit is ahead
    of the others, and routers would send it all tokens, whatever β is.
    """

    share: float = 0.05
    alpha: float = 1.0
    min_steps: int = 80

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and self.alpha >= 0 and self.min_steps >= 0):
            numbers = f"{self.share}, {self.alpha} and {self.min_steps}"
            raise ValueError(f"share must be in [0, 1], alpha and min_steps not negative; got {numbers}")

    def active(self, step: int, num_steps: int) -> bool:
        return step < max(self.share * num_steps, min(self.min_steps, MAX_WARMUP_SHARE * num_steps))


@dataclass(frozen=True, kw_only=True)
class BetaSettings:
    """β's initial value. If `depth` is not 0, β is steered to this mean depth."""

    initial: float
    depth: float = 0.0

    def __post_init__(self) -> None:
        if self.initial < 0 or not 0 <= self.depth < 1:
            raise ValueError(f"initial must not be negative, and depth in [0, 1); got {self.initial} and {self.depth}")


@dataclass
class BetaControl:
    """β, and an integral controller that steers the mean depth Σ p_k l_k / L to `target`. If `target` is 0, β is fixed.

    Each step multiplies β by exp(gain · (smoothed depth − target)) and clamps it. Runs of fewer than `LONG_RUN` steps
    steer faster: with a larger gain and a window that is shorter by the same factor. So the product of both, which
    decides whether β overshoots, stays the same.
    """

    beta: float
    target: float = 0.0
    maximum: float = 1.0
    depth: float | None = None

    def observe_depth(self, depth: float, num_steps: int) -> None:
        if self.target:
            speed_up = max(1.0, math.sqrt(LONG_RUN / num_steps))  # the root, because models respond with a delay
            smoothing = SMOOTHING**speed_up
            self.depth = depth if self.depth is None else smoothing * self.depth + (1 - smoothing) * depth
            steered = self.beta * math.exp(GAIN * speed_up * (self.depth - self.target))
            self.beta = min(max(steered, MIN_BETA), self.maximum)
