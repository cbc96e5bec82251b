"""How often tokens leave at each junction, from the routing and as observed. Torch-free; blocks count from 0."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

HALF_LIFE = 1000
"""Fronts asked at a junction until what was seen before counts half."""

PRIOR_FRONTS = 32
"""How many fronts the first guess counts for."""


class ExitFrequencies:
    """w_k as a running average, usable from the start and forgetting slowly."""

    def __init__(self, exit_probabilities: Iterable[float]) -> None:
        """From a first guess of w_k for every block; the last is 1 whatever it says."""
        guess = list(exit_probabilities)
        self._asked = [float(PRIOR_FRONTS)] * len(guess)
        self._left = [PRIOR_FRONTS * w for w in guess]

    @classmethod
    def even(cls, num_blocks: int) -> "ExitFrequencies":
        """As if every exit emitted equally often."""
        return cls(exit_probabilities([1 / num_blocks] * num_blocks))

    def observe(self, block: int, num_asked: int, num_left: int) -> None:
        """So many fronts were asked at this block's junction, and so many of them left."""
        kept = 0.5 ** (num_asked / HALF_LIFE)
        self._asked[block] = kept * self._asked[block] + num_asked
        self._left[block] = kept * self._left[block] + num_left

    @property
    def exit_probabilities(self) -> tuple[float, ...]:
        """w_k for every block; the last is 1."""
        return (*(left / asked for left, asked in zip(self._left[:-1], self._asked[:-1], strict=True)), 1.0)


def exit_probabilities(routing: Items[float]) -> tuple[float, ...]:
    """w_k = p_k / Σ_{j≥k} p_j; 1 where nothing arrives, and at the end."""
    remaining = [sum(routing[k:]) for k in range(len(routing))]
    early = [p / rest if rest > 0 else 1.0 for p, rest in zip(routing, remaining, strict=True)]
    return (*early[:-1], 1.0)


def reach_probabilities(exit_probabilities: Items[float]) -> list[float]:
    """P(depth ≥ k) = Π_{j<k} (1 − w_j) for every block."""
    reached = [1.0]
    for w in exit_probabilities[:-1]:
        reached.append(reached[-1] * (1 - w))
    return reached
