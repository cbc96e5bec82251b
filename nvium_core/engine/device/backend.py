"""Interface of the backends that run Steps. A runner chooses one when it is made."""

from typing import Protocol

from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.step import Step, StepResult


class Backend(Protocol):
    """Bound to one cache."""

    tokens_ahead: int
    """Most tokens of a sequence that one call may emit; 0 where a call emits one."""

    @property
    def instructions(self) -> str | None:
        """Instruction set and threads of native calls, or "graphs"."""

    def prepare(self, config: EngineConfig) -> None:
        """Compile or capture ahead of the first Step."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        """Run rows through blocks, decide at the fronts and score rows.

        A Step that raises has changed nothing that a retry reads. A later block with more than `max_rows` rows is left
        to another Step, unless the Step is whole.
        """
