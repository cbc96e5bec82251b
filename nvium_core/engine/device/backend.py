"""Interface of the backends that run Steps."""

from typing import Protocol

from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.step import Step, StepResult


class Backend(Protocol):
    tokens_ahead: int
    """Maximum tokens per sequence that one call may emit; 0 if a call emits one."""

    @property
    def instructions(self) -> str | None:
        """Instruction set and threads of native kernels, or "graphs"."""

    def prepare(self, config: EngineConfig) -> None:
        """Compile or capture before the first Step."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        """Run rows through blocks, decide at the front rows, score rows.

        A Step that raises must leave everything unchanged that a retry reads. Unless the Step is whole, it stops before
        a later block with more than `max_rows` rows.
        """
