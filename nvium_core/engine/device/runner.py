"""Runs Steps: rows through their block by a backend, then decisions for fronts and scores.

A Step never overwrites what it reads, so one that raised can be run again. All buffers are allocated once.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from nvium_core.engine.device.scoring import next_tokens
from nvium_core.engine.failures import DeviceLost
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import GOES_ON, FrontDecision, Run, Step, StepResult, certain
from nvium_core.model.nvium import NviumForCausalLM

logger = logging.getLogger(__name__)

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
        self._device = model.device
        with self._on_device():
            self.backend = (make_backend or best)(model, self.cache)
        self._junctions = Junctions(model, self.backend, max_sequences=max_sequences, one_by_one=is_deterministic)
        self._is_asynchronous = model.device.type != "cpu"
        self.has_waited = True
        """Whether the device had nothing left to do when the last run() returned: only then is its time known."""
        self._has_asked = False
        """Behind what the backend ran last, so that it was waited for."""
        self._layer_seconds = self._router_seconds = self._head_seconds = 0.0
        self._last_block = model.config.num_exits - 1
        self.has_drafter = model.drafter is not None

    @property
    def launches_ahead(self) -> bool:
        """A pass may be launched before the last one's tokens are known here."""
        return isinstance(self.backend, GraphsBackend)

    def prepare(self, max_rows: int, max_sequences: int) -> None:
        """Do beforehand what Steps of at most so many rows and sequences would do when they are first met."""
        if isinstance(self.backend, GraphsBackend):
            with self._on_device():
                self.backend.prepare(max_rows, max_sequences)

    def run(self, step: Step) -> list[StepResult]:
        """Run the Step, the rest of its pass if it is part of one, and what the backend runs with it anyway.

        Raises `DeviceLost` if the device has failed. A pass in which a later Step fails ends before it: that Step is
        scheduled again by itself.
        """
        results: list[StepResult] = []
        rest: Step | None = step
        decided: dict[Sequence, FrontDecision] = {}
        reached: dict[Sequence, float] = {}
        while rest is not None:
            try:
                ran = self._run(rest, decided, reached)
            except Exception as error:
                if is_device_lost(error):
                    raise DeviceLost("the device has failed") from error
                if not results:
                    raise
                logger.warning("a pass was cut before block %d: %s", rest.block + 1, error)
                break
            results += ran
            rest = rest.after(len(ran))
            rest = rest and rest.without_fronts(decided)
        has_waited = (self.backend.has_waited or self._has_asked) and not self.backend.is_ahead
        self.has_waited = not self._is_asynchronous or has_waited
        return results

    @property
    def processor(self) -> str:
        """What native calls compute with, such as "avx2x4" with at most four threads; empty where there are none."""
        return f"{self.backend.instructions}x{torch.get_num_threads()}" if self.backend.instructions else ""

    @property
    def part_seconds(self) -> dict[str, float]:
        """By what they went to: "layers", "router", "head"; in all so far. On a GPU the host's time."""
        return {
            "layers": self._layer_seconds,
            "router": self._router_seconds + self._junctions.router_seconds,
            "head": self._head_seconds + self._junctions.head_seconds,
        }

    def _run(
        self, step: Step, decided: dict[Sequence, FrontDecision], reached: dict[Sequence, float]
    ) -> list[StepResult]:
        """What the backend runs in one call. Adds to the decisions for exits, and to what is known of log_reached."""
        started = time.perf_counter()
        with self._on_device():
            results = self._forward(step, decided, reached)
        if len(results) == 1 and results[0].seconds is None and not self._is_asynchronous:
            results[0].seconds = time.perf_counter() - started
        return results

    def _on_device(self) -> AbstractContextManager[object]:
        """What is allocated, recorded and captured is that of the model's device, whichever is current."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _forward(
        self, step: Step, decided: dict[Sequence, FrontDecision], reached: dict[Sequence, float]
    ) -> list[StepResult]:
        started, self._has_asked = time.perf_counter(), False
        results = self.backend.run(step)
        self._count_seconds(results, time.perf_counter() - started)
        if is_settled(step, results):
            return results
        for result in results:
            if not result.is_complete:
                self._decide(result, reached, decided)
            if result.decisions:
                decided.update([pair for pair in result.decisions.items() if pair[1].token_id is not None])
            if result.step.block == self._last_block:
                decided.update([(sequence, certain(tokens[-1])) for sequence, tokens in result.verified.items()])
                self._score(result, decided)
            else:
                result.decisions |= {run.sequence: GOES_ON for run in result.step.runs if passes_over(run)}
        return results

    def _count_seconds(self, results: list[StepResult], elapsed: float) -> None:
        """Native calls are timed without what Python does for them."""
        known = [result.seconds for result in results if result.seconds is not None]
        if not known:
            self._layer_seconds += elapsed
            return
        self._layer_seconds += sum(known) if len(known) == len(results) else elapsed
        for result in results:
            self._layer_seconds -= result.router_seconds + result.head_seconds
            self._router_seconds += result.router_seconds
            self._head_seconds += result.head_seconds

    def _decide(
        self, result: StepResult, reached: dict[Sequence, float], decided: Mapping[Sequence, FrontDecision]
    ) -> None:
        """For the fronts that the backend has not decided for, and that have not emitted in the same call."""
        step, known = result.step, result.decisions.keys() | decided.keys()
        asked = [run for run in step.runs if run.reaches_front and run.sequence not in known]
        self._has_asked |= bool(asked)
        if originals := [run for run in asked if run.sequence.is_original]:
            self._decide_for_originals(result, originals)
        if asked := [run for run in asked if not run.sequence.is_original]:
            own_slots = [slot for run in asked for slot in slots(run.sequence, run.rows[-1:], self.cache.page_size)]
            of_asked = {run.sequence: reached.get(run.sequence, run.sequence.log_reached) for run in asked}
            decisions = self._junctions.decide(step.block, of_asked, own_slots)
            reached |= {sequence: of_asked[sequence] + each.log_continue for sequence, each in decisions.items()}
            result.decisions |= decisions

    def _decide_for_originals(self, result: StepResult, runs: list[Run]) -> None:
        """Drafts behind an early block, and the last exit's tokens behind the last."""
        block, page_size = result.step.block, self.cache.page_size
        if block < self._last_block:
            own_slots = [slot for run in runs for slot in slots(run.sequence, run.rows[-1:], page_size)]
            result.decisions |= self._junctions.draft(block, [run.sequence for run in runs], own_slots)
        else:
            rows = {run.sequence: run.sequence.rows_to_verify(run.rows) for run in runs}
            own_slots = [slot for sequence, own in rows.items() for slot in slots(sequence, own, page_size)]
            result.verified = self._junctions.verify(rows, own_slots)
            if result.step.num_drafts and self.has_drafter:
                self._draft_ahead(result, rows)

    def _draft_ahead(self, result: StepResult, rows: Mapping[Sequence, range]) -> None:
        """The drafter's tokens, behind those of which no draft is left to be verified."""
        said, own_slots = dict[Sequence, list[int]](), list[int]()
        for sequence, tokens in result.verified.items():
            num_right = sequence.num_right(tokens)
            if num_right < len(tokens) and sequence.may_draft:
                said[sequence] = tokens[: num_right + 1]
                own_slots += slots(sequence, rows[sequence][num_right : num_right + 1], self.cache.page_size)
        if said:
            result.drafts = self._junctions.foresee(said, own_slots, result.step.num_drafts)

    def _score(self, result: StepResult, decided: Mapping[Sequence, FrontDecision]) -> None:
        """The rows that have just passed the last block and are to be scored."""
        wanted = [
            (run.sequence, rows)
            for run in result.step.runs
            if run.sequence.needs_scores and (rows := run.sequence.rows_to_score(run.rows))
        ]
        for is_original, score in ((False, self.backend.score), (True, self._junctions.score)):
            pairs = [pair for pair in wanted if pair[0].is_original == is_original]
            if pairs:
                self._has_asked = True
                own_slots = [slot for sequence, rows in pairs for slot in slots(sequence, rows, self.cache.page_size)]
                targets = [token for sequence, rows in pairs for token in next_tokens(sequence, rows, decided)]
                num_top = [sequence.params.logprobs or 0 for sequence, rows in pairs for _ in rows]
                scores = iter(score(own_slots, targets, num_top))
                result.scores |= {sequence: [next(scores) for _ in rows] for sequence, rows in pairs}


def is_settled(step: Step, results: list[StepResult]) -> bool:
    """Nothing of the Step is left to be run, decided or scored."""
    if False in [result.is_complete for result in results] or step.after(len(results)) is not None:
        return False
    return True not in [sequence.needs_scores or sequence.is_original for sequence, _, _ in step.runs]


def passes_over(run: Run) -> bool:
    """A front that samples from the original, and is not asked here."""
    sequence, rows, is_asked = run
    return sequence.is_original and not is_asked and rows.stop == sequence.num_tokens


def is_device_lost(error: Exception) -> bool:
    """The device reports an error, and will for every call; out of memory is none of these."""
    message = str(error)
    is_of_libraries = isinstance(error, RuntimeError) and message.startswith(("CUDA error", "cuDNN error"))
    is_of_device = is_of_libraries or isinstance(error, torch.AcceleratorError)
    return is_of_device and "ALLOC_FAILED" not in message and "out of memory" not in message
