"""A front row that has been routed, and what follows from the router's output."""

import math
from typing import NamedTuple

from nvium_core.engine.schedule.randomness import ROUTE, Purpose, uniform
from nvium_core.engine.schedule.sequence import Sequence


class RoutedFront(NamedTuple):
    """`row` is its place among the fronts routed together; `block` the one it has passed.

    `log_reached`: log Π (1 − w_j) over the blocks before.
    """

    sequence: Sequence
    row: int
    block: int
    log_reached: float
    log_exit: float
    log_continue: float

    @property
    def is_sane(self) -> bool:
        return not math.isnan(self.log_exit + self.log_continue)

    @property
    def exits(self) -> bool:
        """Whether its uniform lets it exit here."""
        return self.uniform(ROUTE) < math.exp(self.log_exit)

    @property
    def exit_probability(self) -> float:
        """p_k."""
        return math.exp(self.log_reached + self.log_exit)

    @property
    def remaining(self) -> float:
        """r_k, the mass of the exits to come."""
        return math.exp(self.log_reached + self.log_continue)

    @property
    def may_be_certain(self) -> bool:
        """Whether the top of m_k, whose mass is 1 − r_k, can lead by more than r_k."""
        return self.remaining < 1 / 2

    def uniform(self, purpose: Purpose) -> float:
        return front_uniform(self.sequence, self.block, purpose)


def front_uniform(sequence: Sequence, block: int, purpose: Purpose) -> float:
    """The uniform of a sequence's front row behind a block."""
    return uniform(sequence.seed, sequence.choice, sequence.num_tokens - 1, block, purpose)
