"""Native calls for what they are known to be fast at, and the layers for longer runs."""

import sys
from collections.abc import Sequence as Items

from torch import Tensor

from nvium_core.choices import Instructions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native.fronts import NativeFronts
from nvium_core.engine.device.native.instructions import instructions as resolved
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.device.native.scorer import NativeScorer
from nvium_core.engine.device.native.steps import NativeSteps
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult
from nvium_core.model.nvium import NviumForCausalLM


class NativeBackend:
    """`is_deterministic`: everything runs natively, where no bit of a row depends on its company."""

    has_waited = True

    def __init__(
        self,
        model: NviumForCausalLM,
        cache: PagedCache,
        *,
        max_sequences: int,
        is_deterministic: bool = False,
        instructions: Instructions = "auto",
    ) -> None:
        self.instructions: str | None = resolved(instructions)
        library = native_library(self.instructions)
        assert library is not None
        self.threads = Threads.all()
        self.steps = NativeSteps(library, model, cache, max_sequences=max_sequences, threads=self.threads)
        self.is_deterministic = is_deterministic
        if is_deterministic:
            self.steps.max_run_rows = sys.maxsize
        self.fronts = NativeFronts(library, model, cache.states_NSD, self.steps.exits, self.threads)
        self.scorer = NativeScorer(library, model, cache.states_NSD, self.steps.exits, self.threads)
        self._layers = LayersBackend(model, cache)

    @property
    def max_native_rows(self) -> int:
        return self.steps.max_run_rows

    @max_native_rows.setter
    def max_native_rows(self, num_rows: int) -> None:
        self.steps.max_run_rows = num_rows

    @property
    def is_ahead(self) -> bool:
        return False

    def run(self, step: Step) -> list[StepResult]:
        return self.steps.run(step) if self.steps.suits(step) else self._layers.run(step)

    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        return self.fronts.route(block, slots)

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        return self.fronts.draw(block, x_FD, rows, sequences, uniforms)

    @property
    def draft_share(self) -> float:
        return self.fronts.draft_share

    def draft(self, block: int, x_FD: Tensor, sequences: Items[Sequence], uniforms: Items[float]) -> list[int]:
        return self.fronts.draft(block, x_FD, sequences, uniforms)

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        return self.fronts.logits(block, x_RD)

    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        return self.scorer.score(slots, targets, num_top)
