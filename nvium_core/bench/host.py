"""The engine's own time a step: all but the device's work, in place of which a stub answers.

A step is one call of `Engine.step()`: a block for some sequences, or a whole pass, which emits a token of each. With
native calls the stub stands behind everything that Python prepares for them and reads of them; elsewhere it is the
whole backend. What the stub itself takes is not counted. Times are the processor's, so a busy machine disturbs little.
"""

import ctypes
import random
import sys
import time
from collections.abc import Sequence as Items
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table
from torch import Tensor

from nvium_core.bench.harness import Figures, Subject
from nvium_core.bench.shapes import exit_odds
from nvium_core.choices import Schedule
from nvium_core.engine.device.native import NativeBackend
from nvium_core.engine.device.native.steps import GOES_ON, OUTCOME, BlockShape, NativeStep
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Score
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import FrontDecision, Step, StepResult
from nvium_core.model.nvium import NviumForCausalLM

SCHEDULES: tuple[Schedule, ...] = ("synchronous", "sweep")
"""Whole passes, and a block at a time."""

PROMPT_TOKENS = 8


class Stub:
    """Fronts exit with the same probability at each early exit, and emit the same token."""

    def __init__(self, num_exits: int) -> None:
        shares = [1 / num_exits] * num_exits
        self._exits = [*(float(odds[1]) for odds in exit_odds(shares)), 1.0]
        self._draws = random.Random(0)
        self.seconds = 0.0
        """What answering took."""

    def exits(self, block: int) -> bool:
        return self._draws.random() < self._exits[block]


class NativeStub(Stub):
    """In place of the library's `run`."""

    def __call__(self, first: Any, count: int, goes_on_anyway: bool, *_: Any) -> int:
        started = time.thread_time()
        step = ctypes.cast(first, ctypes.POINTER(NativeStep))[0]
        block, ran = BlockShape.from_address(step.shape).boundary, 0
        left = list(range(step.num_fronts))
        outcomes = (ctypes.c_char * (OUTCOME.size * step.num_fronts)).from_address(step.outcomes)
        while ran < count and (ran == 0 or left or goes_on_anyway):
            tokens = {front: 1 if self.exits(block + ran) else GOES_ON for front in left}
            for front, token in tokens.items():
                OUTCOME.pack_into(outcomes, OUTCOME.size * front, block + ran, token, -1.0, -1.0)
            left = [front for front in left if tokens[front] == GOES_ON]
            ran += 1
        self.seconds += time.thread_time() - started
        return ran


class BackendStub(Stub):
    """In place of a backend."""

    max_native_rows = 0
    instructions: str | None = None
    is_ahead = False
    draft_share = 1.0

    def run(self, step: Step) -> list[StepResult]:
        started = time.thread_time()
        result = StepResult(step, is_complete=True)
        for run in step.runs:
            if run.reaches_front:
                result.decisions[run.sequence] = FrontDecision(1 if self.exits(step.block) else None, -1.0, -1.0)
        self.seconds += time.thread_time() - started
        return [result]

    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        raise NotImplementedError("all fronts are decided for in run()")

    def draft(self, block: int, x_FD: Tensor, sequences: Items[Sequence], uniforms: Items[float]) -> list[int]:
        raise NotImplementedError("nothing is drafted")

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        raise NotImplementedError("all fronts are decided for in run()")

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        raise NotImplementedError("all fronts are decided for in run()")

    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        raise NotImplementedError("nothing is scored")


def measure(
    subject: Subject, *, sequences: Items[int] = (1, 8, 32, 64, 256), tokens: int = 64, repeats: int = 3
) -> Figures:
    """A row for each number of sequences and schedule; of the turns the fastest counts."""
    rows = [own_time(subject, number, schedule, tokens, repeats) for number in sequences for schedule in SCHEDULES]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def own_time(subject: Subject, num_sequences: int, schedule: Schedule, num_tokens: int, repeats: int) -> Figures:
    page_size = 16
    config = EngineConfig(
        schedule=schedule,
        max_sequences=num_sequences,
        max_rows_per_step=max(256, num_sequences),
        cache_tokens=num_sequences * (PROMPT_TOKENS + num_tokens + page_size),
        page_size=page_size,
        prefix_caching=False,
    )
    engine, stub = stubbed(subject.model, config)
    turns = [generate(engine, stub, num_sequences, num_tokens, turn) for turn in range(repeats)]
    return {
        "sequences": num_sequences,
        "schedule": schedule,
        "step_us": min(1e6 * own / steps for own, steps in turns),
        "token_us": min(1e6 * own / (num_sequences * num_tokens) for own, _ in turns),
        "steps": round(median(steps for _, steps in turns)),
    }


def stubbed(model: NviumForCausalLM, config: EngineConfig) -> tuple[Engine, Stub]:
    engine = Engine(model, config)
    backend = engine.runner.backend
    if isinstance(backend, NativeBackend):
        stub = NativeStub(model.config.num_exits)
        backend.steps.run_native = stub
        backend.max_native_rows = sys.maxsize
        return engine, stub
    answers = BackendStub(model.config.num_exits)
    return Engine(model, config, make_runner=partial(Runner, make_backend=lambda *_: answers)), answers


def generate(engine: Engine, stub: Stub, num_sequences: int, num_tokens: int, turn: int) -> tuple[float, int]:
    """The engine's own seconds of all steps but the prompts', and how many they were."""
    params = SamplingParams(max_tokens=num_tokens, seed=turn, ignore_eos=True)
    for number in range(num_sequences):
        engine.add(str(number), list(range(1, PROMPT_TOKENS + 1)), params)
    while any(not sequence.num_generated for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    stub.seconds, steps, started = 0.0, 0, time.thread_time()
    while engine.has_work:
        engine.step()
        steps += 1
    return time.thread_time() - started - stub.seconds, steps


def table(figures: Figures) -> Table:
    result = Table("sequences", "schedule", "µs a step", "µs a token", caption="Without the device's work.")
    for row in figures["rows"]:
        result.add_row(str(row["sequences"]), row["schedule"], f"{row['step_us']:.0f}", f"{row['token_us']:.1f}")
    return result
