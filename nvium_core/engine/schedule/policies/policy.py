"""The interface of a policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from typing import Self

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies
from nvium_core.engine.schedule.sequence import Sequence


class Policy(ABC):
    """Two decisions: the block a sequence is ready for, and which of these blocks to run.

    All sequences that are ready for the chosen block move together.
    """

    passes_scored = False
    """Several sequences whose every token is scored go through all blocks at once: they must anyway, and heads and
    scores of all are then one call."""

    @classmethod
    def of(cls, costs: StepCosts, frequencies: ExitFrequencies, *, learns: bool = True) -> Self:
        """A policy for these costs and exit frequencies, kept up to date if it `learns`; most need neither."""
        return cls()

    def ready_block(self, sequence: Sequence) -> int:
        """The block this sequence has to run next."""
        return sequence.front_block

    @abstractmethod
    def choose(self, num_waiting: Items[int]) -> int:
        """The block to run, given how many sequences are ready for each; at least one is."""

    def passes_whole(self, num_sequences: int) -> bool:
        """Whether rows go through all blocks at once, so that no layer is deferred: worth it where returning to the
        scheduler costs more than the layers that tokens do not need."""
        return False

    def observe(  # noqa: B027 (most learn nothing)
        self, block: int, *, num_rows: int, seconds: float | None, num_asked: int, num_left: int, follows: bool = False
    ) -> None:
        """A Step is over: its time if that is known, how many fronts were routed and how many of them exited.

        `follows`: it ran in one call with the one before it.
        """

    def observe_pass(self, *, num_rows: int, seconds: float) -> None:  # noqa: B027
        """So many rows passed all blocks."""

    def solve_now(self, num_sequences: int) -> None:  # noqa: B027 (most need no table)
        """Be ready for so many sequences when this returns."""

    def wait(self) -> None:  # noqa: B027
        """Return when nothing is being solved in the background."""


def deepest(num_waiting: Items[int]) -> int:
    """The deepest block that any sequence is ready for."""
    return max(block for block, count in enumerate(num_waiting) if count)
