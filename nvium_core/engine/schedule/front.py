"""A front at a junction: a row that may speak, and what follows from the router's answer to it. Torch-free."""

import math
from typing import NamedTuple

from nvium_core.engine.schedule.randomness import ROUTE, Purpose, uniform
from nvium_core.engine.schedule.sequence import Sequence


class Front(NamedTuple):
    """Whose front it is, its row among those asked, the block it has passed and the router's log-probabilities."""

    sequence: Sequence
    row: int
    block: int
    log_exit: float
    log_continue: float

    @property
    def is_sane(self) -> bool:
        return not math.isnan(self.log_exit + self.log_continue)

    @property
    def samples_mixture(self) -> bool:
        """Whether f is applied to π_mix, which takes all exits."""
        return self.sequence.params.sampling == "mixture"

    @property
    def needs_mixture(self) -> bool:
        return self.samples_mixture or self.sequence.params.is_greedy

    @property
    def is_routed(self) -> bool:
        """Whether it leaves here if its exit is drawn."""
        return self.uniform(ROUTE) < math.exp(self.log_exit)

    @property
    def exit_probability(self) -> float:
        """p_k."""
        return math.exp(self.sequence.log_reached + self.log_exit)

    @property
    def remaining(self) -> float:
        """r_k, the mass of the exits to come."""
        return math.exp(self.sequence.log_reached + self.log_continue)

    @property
    def may_be_certain(self) -> bool:
        """Whether m_k, of mass 1 − r_k, can lead by more than r_k."""
        return self.remaining < 1 / 2

    @property
    def might_have_been_certain(self) -> bool:
        """Whether that was so at the junction before."""
        return math.exp(self.sequence.log_reached) < 1 / 2

    def uniform(self, purpose: Purpose) -> float:
        """The number that decides this."""
        return front_uniform(self.sequence, self.block, purpose)


def front_uniform(sequence: Sequence, block: int, purpose: Purpose) -> float:
    """The number that decides this for a sequence's front behind a block."""
    return uniform(sequence.seed, sequence.choice, sequence.num_tokens - 1, block, purpose)
