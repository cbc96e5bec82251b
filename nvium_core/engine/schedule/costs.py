"""What a Step costs, measured: seconds of its block by the number of rows, of its junction by the number of fronts that
are asked, and of the engine itself. Knows nothing of devices or of torch.

Blocks count from 0.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, Self

from nvium_core.engine.params import require

RATE = 0.05
"""How much of what one observation says is believed, in the logarithm."""

MAX_SURPRISE = 2.0
"""No observation counts as further from the expected than this factor, so a process that was paused spoils nothing."""


Line = tuple[float, float]
"""Seconds, fixed and for each of something."""


class StepCosts:
    """t_k(r), the seconds block k takes for r rows, linear between measured points and beyond them; what is added where
    fronts are asked; and what the engine takes itself."""

    def __init__(
        self,
        points: Mapping[int, Mapping[int, float]],
        junctions: Items[Line] | None = None,
        own: Line = (0.0, 0.0),
        passes: Mapping[int, float] | None = None,
    ) -> None:
        """From {block: {rows: seconds}}, of each block's junction a line over the fronts, and one of the engine's own
        time; those that are left out are free. `passes`: {rows: seconds} of all blocks at once, junctions included.

        Raises `InvalidRequest` unless all blocks have points, all positive, and no junction's costs are negative.
        """
        require(points.keys() == {*range(len(points))} != set(), "costs", "must be given for every block, from 0 on")
        for block, seconds in points.items():
            is_positive = all(rows >= 1 and 0 < cost < math.inf for rows, cost in seconds.items())
            require(len(seconds) > 0 and is_positive, "costs", f"block {block} needs positive seconds by positive rows")
        lines = [(0.0, 0.0) for _ in points] if junctions is None else [(fixed, each) for fixed, each in junctions]
        are_known = len(lines) == len(points) and all(map(is_sound, lines))
        require(are_known, "costs", "junctions need two numbers for every block, none of them negative")
        require(is_sound(own), "costs", "the engine's own must be two numbers, none of them negative")
        are_positive = all(rows >= 1 and 0 < cost < math.inf for rows, cost in (passes or {}).items())
        require(are_positive, "costs", "passes need positive seconds by positive rows")
        self.junctions = lines
        self.own = own
        self.passes = dict(sorted((passes or {}).items()))
        self._rows = [sorted(points[block]) for block in range(len(points))]
        self._seconds = [[points[block][rows] for rows in self._rows[block]] for block in range(len(points))]

    @classmethod
    def linear(cls, fixed: Items[float], per_row: Items[float]) -> Self:
        """a_k + b_k·r, both in seconds, both per block."""
        pairs = enumerate(zip(fixed, per_row, strict=True))
        return cls({block: {1: a + b, 2: a + 2 * b} for block, (a, b) in pairs})

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """What `as_dict` gave, perhaps by way of JSON. Raises `InvalidRequest` for anything else."""
        try:
            points = [{int(rows): float(cost) for rows, cost in block.items()} for block in saved["blocks"]]
            lines = saved.get("junctions")
            junctions = None if lines is None else [(float(fixed), float(each)) for fixed, each in lines]
            fixed, each = saved.get("own", (0.0, 0.0))
            own = float(fixed), float(each)
            passes = {int(rows): float(cost) for rows, cost in saved.get("passes", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            points, junctions, own, passes = [], None, (0.0, 0.0), {}
        form = (
            '{"blocks": [{rows: seconds, …}, …]}, perhaps with "junctions": [[fixed, each], …], "own": [fixed, each], '
        )
        form += '"passes": {rows: seconds, …}'
        require(len(points) > 0, "costs", f"must be {form}")
        return cls(dict(enumerate(points)), junctions, own, passes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: {"blocks": [{rows: seconds}, …], "junctions": [[fixed, per front], …], "own": [fixed, per front],
        "passes": {rows: seconds}}. Rows are strings.
        """
        blocks = [{str(rows): cost for rows, cost in block.items()} for block in self.points.values()]
        passes = {str(rows): cost for rows, cost in self.passes.items()}
        lines = [list(line) for line in self.junctions]
        return {"blocks": blocks, "junctions": lines, "own": list(self.own), "passes": passes}

    def copy(self) -> "StepCosts":
        """The same, which learns by itself."""
        return StepCosts(self.points, self.junctions, self.own, self.passes)

    def with_own(self, own: Line) -> "StepCosts":
        """The same, with what the engine takes itself for a Step, and for each of its fronts."""
        return StepCosts(self.points, self.junctions, own, self.passes)

    @property
    def points(self) -> dict[int, dict[int, float]]:
        """{block: {rows: seconds}} as they now stand."""
        pairs = enumerate(zip(self._rows, self._seconds, strict=True))
        return {block: dict(zip(rows, seconds, strict=True)) for block, (rows, seconds) in pairs}

    @property
    def num_blocks(self) -> int:
        return len(self._rows)

    @property
    def fixed(self) -> list[float]:
        """a_k of the fit a_k + b_k·r, in seconds."""
        return [_fit(rows, seconds)[0] for rows, seconds in zip(self._rows, self._seconds, strict=True)]

    @property
    def per_row(self) -> list[float]:
        """b_k of the fit a_k + b_k·r, in seconds."""
        return [_fit(rows, seconds)[1] for rows, seconds in zip(self._rows, self._seconds, strict=True)]

    def seconds(self, block: int, rows: float, fronts: int = 0) -> float:
        """Of a Step that asks so many fronts; rows may be a mean, so not whole."""
        return self._of_rows(block, rows) + at(self.junctions[block], fronts) + self.own[0] + self.own[1] * fronts

    def seconds_following(self, block: int, rows: float, fronts: float = 0) -> float:
        """Of a Step that is run with the one before it, for which the engine has done its part already."""
        return self._of_rows(block, rows) + at(self.junctions[block], fronts)

    def pass_seconds(self, rows: int) -> float:
        """Of all blocks at once with so many fronts; infinite if that was never measured."""
        if not self.passes:
            return math.inf
        measured, seconds = list(self.passes), list(self.passes.values())
        return interpolated(measured, seconds, rows) + self.own[0] + self.own[1] * rows

    def _of_rows(self, block: int, rows: float) -> float:
        """t_k(r)."""
        return interpolated(self._rows[block], self._seconds[block], rows)

    def observe(self, block: int, rows: int, fronts: int, seconds: float) -> None:
        """Let a Step that was run by itself and timed move the nearest points a little, and those of passes by its
        block's part: on a machine that became slower, passes are slower too. Junctions stay."""
        rate = RATE * math.log(bounded(seconds / self.seconds(block, rows, fronts)))
        for index, share in nearest(self._rows[block], rows):
            self._seconds[block][index] *= math.exp(rate * share)
        self._move_passes(rows, rate / self.num_blocks)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Let a pass that was timed move the nearest points a little, and its blocks' alike: that it takes longer than
        expected, on a busy machine, does not say that its Steps would take less by themselves."""
        if self.passes:
            rate = RATE * math.log(bounded(seconds / self.pass_seconds(rows)))
            self._move_passes(rows, rate)
            for own_rows, own_seconds in zip(self._rows, self._seconds, strict=True):
                for index, share in nearest(own_rows, rows):
                    own_seconds[index] *= math.exp(rate * share)

    def _move_passes(self, rows: int, rate: float) -> None:
        """The nearest points, in the logarithm."""
        measured = list(self.passes)
        for index, share in nearest(measured, rows) if measured else ():
            self.passes[measured[index]] *= math.exp(rate * share)

    def with_bounded_passes(self) -> "StepCosts":
        """The same, where no pass costs more than its blocks by themselves. It cannot: one that was measured to do so
        was disturbed, and would make staircases look better than they are."""
        passes = {rows: min(seconds, self.apart(rows)) for rows, seconds in self.passes.items()}
        return StepCosts(self.points, self.junctions, self.own, passes)

    def apart(self, rows: int) -> float:
        """Seconds of all blocks, one by one, with the fronts that come to each if every exit emits equally often."""
        blocks = range(self.num_blocks)
        return sum(self.seconds_following(block, rows, rows * (1 - block / len(blocks))) for block in blocks)


def bounded(surprise: float) -> float:
    return min(max(surprise, 1 / MAX_SURPRISE), MAX_SURPRISE)


def around(measured: Items[int], rows: float) -> tuple[int, int]:
    """The two points whose line counts; the same one twice if there is no other."""
    right = min(max(bisect_right(measured, rows), 1), len(measured) - 1)
    return max(right - 1, 0), right


def interpolated(measured: Items[int], seconds: Items[float], rows: float) -> float:
    """Linear between measured points and beyond them, but never falling beyond."""
    left, right = around(measured, rows)
    r0, r1, t0, t1 = measured[left], measured[right], seconds[left], seconds[right]
    slope = (t1 - t0) / (r1 - r0) if left < right else 0.0
    if r0 <= rows <= r1:
        return t0 + slope * (rows - r0)
    if rows < r0:
        return max(t0 - max(slope, 0) * (r0 - rows), t0 * rows / r0)
    return t1 + max(slope, 0) * (rows - r1)


def nearest(measured: Items[int], rows: int) -> list[tuple[int, float]]:
    """The points that an observation is about, with its share for each."""
    left, right = around(measured, rows)
    r0, r1 = measured[left], measured[right]
    if rows <= r0:
        return [(left, 1.0)]
    if rows >= r1:
        return [(right, 1.0)]
    return [(left, (r1 - rows) / (r1 - r0)), (right, (rows - r0) / (r1 - r0))]


def at(junction: Line, fronts: float) -> float:
    """Seconds of asking so many."""
    fixed, each = junction
    return fixed + each * fronts if fronts else 0.0


def is_sound(line: Line) -> bool:
    return all(0 <= seconds < math.inf for seconds in line)


def _fit(rows: Items[int], seconds: Items[float]) -> tuple[float, float]:
    """a, b ≥ 0 with the least sum of squared relative errors of a + b·r."""
    ones = sum(1 / t**2 for t in seconds)
    mixed = sum(r / t**2 for r, t in zip(rows, seconds, strict=True))
    squares = sum((r / t) ** 2 for r, t in zip(rows, seconds, strict=True))
    to_fixed = sum(1 / t for t in seconds)
    to_row = sum(r / t for r, t in zip(rows, seconds, strict=True))
    determinant = ones * squares - mixed**2
    if len(rows) == 1 or to_row * ones <= to_fixed * mixed:
        return to_fixed / ones, 0.0
    if to_fixed * squares <= to_row * mixed:
        return 0.0, to_row / squares
    return (to_fixed * squares - to_row * mixed) / determinant, (to_row * ones - to_fixed * mixed) / determinant
