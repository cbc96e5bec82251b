"""What changes while training: the learning rate, the two phases of the objective, and β steered by mean depth.

Plain arithmetic, no torch.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up over the first `warmup` share of the steps, then cosine decay to `final_ratio` of the maximum."""

    maximum: float
    warmup: float = 0.01
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not (self.maximum > 0 and 0 <= self.warmup < 1):
            raise ValueError(f"maximum must be positive and warmup in [0, 1), got {self.maximum} and {self.warmup}")

    def at(self, progress: float) -> float:
        """The rate at `progress` in [0, 1]."""
        if progress < self.warmup:
            return self.maximum * progress / self.warmup
        decayed = (progress - self.warmup) / (1 - self.warmup)
        return self.maximum * (self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * decayed)))


@dataclass(frozen=True, kw_only=True)
class RouterWarmup:
    """The first `share` of the steps balance the routers with weight `alpha`; β acts only afterwards."""

    share: float = 0.05
    alpha: float = 1.0

    def active(self, progress: float) -> bool:
        return progress < self.share


@dataclass(kw_only=True)
class DepthSteering:
    """β as an integral controller on the mean depth Σ p_k l_k / L.

    Each step multiplies β by exp(gain · (smoothed depth − target)), within bounds: too deep raises the price of
    compute, too shallow lowers it. Without a target β stays as it is.
    """

    beta: float
    target: float | None = None
    gain: float = 0.05
    smoothing: float = 0.98
    minimum: float = 1e-3
    maximum: float = 1.0
    depth: float | None = None

    def observe(self, depth: float) -> None:
        """Record one batch's mean depth and adjust β."""
        self.depth = depth if self.depth is None else self.smoothing * self.depth + (1 - self.smoothing) * depth
        if self.target is not None:
            steered = self.beta * math.exp(self.gain * (self.depth - self.target))
            self.beta = min(max(steered, self.minimum), self.maximum)
