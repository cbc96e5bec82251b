"""The interface of a policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Counts

from nvium_core.engine.schedule.sequence import Sequence


class Policy(ABC):
    """Two decisions: the block a sequence waits for, and which of the blocks waited for to run.

    All sequences that wait for the chosen block move together.
    """

    defers = True
    """Whether layers that a token did not need are put off."""

    def ready_block(self, sequence: Sequence) -> int:
        """The block this sequence has to run next."""
        return sequence.front_block

    @abstractmethod
    def choose(self, num_waiting: Counts[int]) -> int:
        """The block to run, given how many sequences wait for each; at least one waits somewhere."""

    def observe(  # noqa: B027 (most learn nothing)
        self, block: int, *, num_rows: int, seconds: float, num_asked: int, num_left: int, follows: bool = False
    ) -> None:
        """A Step is over: what it took, how many fronts were asked at its junction and how many of them left.

        `follows`: it was run with the one before it.
        """


def deepest(num_waiting: Counts[int]) -> int:
    """The deepest block that any sequence waits for."""
    return max(block for block, count in enumerate(num_waiting) if count)
