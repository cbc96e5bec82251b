"""Schedules of the learning rate and of the router warm-up. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cosine", "wsd"]


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


MAX_WARMUP_SHARE = 0.8  # of a run whose router warm-up takes `min_steps`


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
