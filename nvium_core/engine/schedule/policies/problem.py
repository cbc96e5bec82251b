"""Which block next, as a problem to be solved: what running a block costs, and how often tokens leave after it."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.schedule.costs import Line, StepCosts, at
from nvium_core.engine.schedule.exit_frequencies import reach_probabilities

Floats = NDArray[np.float64]

MAX_ROWS_PER_VISIT = 64.0
"""Rows one sequence is thought to bring along at most, however rarely its block is reached."""

LEAST_SHARE = 0.1
"""Of a Step's cost, that no call shared with others saves."""

COST_TOLERANCE, EXIT_TOLERANCE = 0.10, 0.05
"""How far a cost (relative to all) and an exit probability may move before the problem is another one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Hashable, so that solutions can be kept: per block points of t_k(r) as (rows, seconds), w_k and the junction's
    costs; and the engine's own."""

    points: tuple[tuple[tuple[int, float], ...], ...]
    exit_probabilities: tuple[float, ...]
    junctions: tuple[Line, ...]
    own: Line
    passes: tuple[tuple[int, float], ...] = ()
    """Seconds of all blocks at once, by rows."""

    @classmethod
    def of(cls, costs: StepCosts, exit_probabilities: Items[float]) -> Self:
        points = tuple(tuple(block.items()) for block in costs.points.values())
        return cls(points, tuple(exit_probabilities), tuple(costs.junctions), costs.own, tuple(costs.passes.items()))

    @property
    def num_blocks(self) -> int:
        return len(self.exit_probabilities)

    def rounded(self) -> Self:
        """The same problem to two digits, in units of all blocks' first points: no policy depends on the unit."""
        unit = sum(block[0][1] for block in self.points)
        points = tuple(tuple((rows, _two_digits(cost / unit)) for rows, cost in block) for block in self.points)
        *junctions, own = ((_two_digits(a / unit), _two_digits(b / unit)) for a, b in (*self.junctions, self.own))
        exits = tuple(round(w, 2) for w in self.exit_probabilities)
        passes = tuple((rows, _two_digits(cost / unit)) for rows, cost in self.passes)
        return type(self)(points, exits, tuple(junctions), own, passes)

    def is_near(self, other: "Problem") -> bool:
        """Whether the solution of one will do for the other; both are `rounded`."""
        ours, theirs = (np.array([cost for block in (*p.points, p.passes) for _, cost in block]) for p in (self, other))
        moved = np.subtract(self.exit_probabilities, other.exit_probabilities)
        return bool(np.all(np.abs(np.log(ours / theirs)) <= math.log1p(COST_TOLERANCE))) and bool(
            np.all(np.abs(moved) <= EXIT_TOLERANCE)
        )

    def visit_seconds(self, num_sequences: int) -> Floats:
        """What running block k for m sequences costs, [K, 0…n].

        Every row passes every block once, so a visit brings 1 / P(depth ≥ k) rows on average. A lone sequence's Steps
        run in one call, so the first alone has the engine's own cost, and later ones cost less than by themselves.
        """
        rows_K = [min(1 / max(p, 1e-9), MAX_ROWS_PER_VISIT) for p in reach_probabilities(self.exit_probabilities)]
        moving = range(1, num_sequences + 1)
        costs, saved = self._costs, self._saved_by_following if num_sequences == 1 else 0.0

        def seconds(block: int, moving: int) -> float:
            rows = moving * rows_K[block]
            if num_sequences > 1 or block == 0:
                return costs.seconds(block, rows, moving)
            alone = costs.seconds_following(block, rows, moving)
            return max(alone - saved, LEAST_SHARE * alone)

        return np.array([[0.0, *(seconds(block, m) for m in moving)] for block in range(self.num_blocks)])

    @property
    def _saved_by_following(self) -> float:
        """Of a Step that runs in one call with the one before: what a whole pass takes less than its Steps."""
        if not self.passes or self.num_blocks == 1:
            return 0.0
        costs, reached = self._costs, reach_probabilities(self.exit_probabilities)
        bare = sum(costs.seconds_following(block, 1) for block in range(self.num_blocks))
        asked = sum(p * at(junction, 1) for p, junction in zip(reached, self.junctions, strict=True))
        return max(0.0, bare + asked + costs.own[0] + costs.own[1] - costs.pass_seconds(1)) / (self.num_blocks - 1)

    def pass_rate(self, num_sequences: int) -> float:
        """Tokens per second of whole passes; 0 if unknown."""
        return num_sequences / self._costs.pass_seconds(num_sequences)

    @property
    def _costs(self) -> StepCosts:
        points = {block: dict(points) for block, points in enumerate(self.points)}
        return StepCosts(points, self.junctions, self.own, dict(self.passes))


def _two_digits(number: float) -> float:
    return float(f"{number:.2g}")
