"""Runs Steps: rows through their block by a backend, then decisions for fronts and scores.

A Step never overwrites what it reads, so one that raised can be run again. All buffers are allocated once.
"""

from collections.abc import Callable
from functools import partial

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.device import native
from nvium_core.engine.device.backend import Backend
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.junction import Junctions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.layers.fixed_order import FixedOrderBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.processor import use_threads
from nvium_core.engine.device.scoring import Ledger
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.step import Step, StepResult
from nvium_core.model.nvium import NviumForCausalLM

MAX_SCORED_ROWS = 32
"""Rows that are scored together."""

MakeBackend = Callable[[NviumForCausalLM, PagedCache], Backend]


def best_backend(
    model: NviumForCausalLM,
    cache: PagedCache,
    *,
    max_sequences: int,
    is_deterministic: bool,
    instructions: Instructions = "auto",
) -> Backend:
    if native.knows(model, instructions):
        return native.NativeBackend(
            model,
            cache,
            max_sequences=max_sequences,
            is_deterministic=is_deterministic,
            instructions=instructions,
        )
    if is_deterministic:
        return FixedOrderBackend(model, cache)
    return GraphsBackend(model, cache) if model.device.type == "cuda" else LayersBackend(model, cache)


class Runner:
    """`is_deterministic`: no bit of a row depends on what else runs, at the cost of speed."""

    def __init__(
        self,
        model: NviumForCausalLM,
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        is_deterministic: bool = False,
        instructions: Instructions = "auto",
        threads: str = "auto",
        make_backend: MakeBackend | None = None,
    ) -> None:
        """`make_backend` is for tests and measurements; the default is the fastest for the model and its device."""
        use_threads(threads)
        self.has_fixed_threads = threads != "auto"
        self.model = model.eval()
        self.cache = PagedCache(model.config, num_pages=num_pages, page_size=page_size, like=model.lm_head.weight)
        best = partial(
            best_backend,
            max_sequences=max_sequences,
            is_deterministic=is_deterministic,
            instructions=instructions,
        )
        self.backend = (make_backend or best)(model, self.cache)
        self._junctions = Junctions(model, self.backend, max_sequences=max_sequences, one_by_one=is_deterministic)
        max_scored_rows = 1 if is_deterministic else MAX_SCORED_ROWS
        self._ledger = Ledger(model, max_sequences=max_sequences, rows_at_once=max_scored_rows)

    def run(self, step: Step) -> list[StepResult]:
        """Run the Step, and those that follow it as far as the backend does."""
        results = self.backend.run(step)
        for result in results:
            self._decide(result)
            self._score(result)
        return results

    @property
    def processor(self) -> str:
        """What native calls compute with, such as "avx2x4" with at most four threads; empty where there are none."""
        return f"{self.backend.instructions}x{torch.get_num_threads()}" if self.backend.instructions else ""

    def _decide(self, result: StepResult) -> None:
        """For the fronts that the backend has not decided for."""
        step = result.step
        asked = [run for run in step.runs if run.reaches_front and run.sequence not in result.decisions]
        if asked:
            own_slots = [slot for run in asked for slot in slots(run.sequence, run.rows[-1:], self.cache.page_size)]
            result.decisions |= self._junctions.decide(step.block, [run.sequence for run in asked], own_slots)

    @torch.inference_mode()
    def _score(self, result: StepResult) -> None:
        """After the last block; until then keep what scores will need."""
        step = result.step
        wanted = {
            run.sequence: rows
            for run in step.runs
            if run.sequence.needs_logprobs and (rows := run.sequence.rows_to_score(run.rows))
        }
        if wanted:
            own_slots = [
                slot for sequence, rows in wanted.items() for slot in slots(sequence, rows, self.cache.page_size)
            ]
            h_SD = self.cache.states_behind(step.block)[torch.tensor(own_slots, device=self.cache.keys.device)]
            if step.block < self._ledger.last_block:
                self._ledger.keep(step.block, wanted, h_SD)
            else:
                result.scores = self._ledger.score(wanted, h_SD, result.decisions)
