"""What computes Steps on a device. One is chosen when a runner is made."""

from collections.abc import Sequence as Items
from typing import Protocol

from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult


class Backend(Protocol):
    """Reads and writes the cache that it was made with.

    Shapes: F front rows, D width.
    """

    max_native_rows: int
    """Rows of one sequence that run in a native call; 0 where nothing does."""

    instructions: str | None
    """Of native calls."""

    has_waited: bool
    """For all that the last run() queued on the device."""

    @property
    def is_ahead(self) -> bool:
        """A pass runs on the device that the scheduler has not asked for yet."""

    def run(self, step: Step) -> list[StepResult]:
        """Forward the Step's rows through its block, and as many Steps that follow as take no more host overhead.

        Decides for those fronts that it can decide for on the way.
        """

    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        """Of the rows in these slots, behind the block: normed states [F, D], and log w of going on and exiting."""

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        """A token for each of these rows of x_FD, from f of its logits."""

    @property
    def draft_share(self) -> float:
        """How much of the head a draft reads."""

    def draft(self, block: int, x_FD: Tensor, sequences: Items[Sequence], uniforms: Items[float]) -> list[int]:
        """As `draw`, of all rows, for sequences that sample from the original; but drafts may be rough."""

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        """Of normed rows behind the block, [R, V], float32 or better."""

    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        """log π_mix of a target in each of these slots, whose rows have passed every block, and alternatives."""
