"""The engine's own time a step: all but the device's work, in place of which a stub answers.

A step is one call of `Engine.step()`: a block for some sequences, or a whole pass, which emits a token of each. The
stub stands behind everything that Python prepares for native calls and reads of them; and in place of CUDA graphs,
so that no GPU is needed to see what packing their inputs and reading their answers takes. What the stub itself takes is
not counted. Times are the processor's, whose pace other work on the machine changes for seconds at a time: turns go
through all numbers of sequences, and the fastest counts. A first turn, which fills the cache with prompts, does not.
"""

import ctypes
import math
import random
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject
from nvium_core.bench.shapes import exit_odds
from nvium_core.choices import Schedule
from nvium_core.engine.device import native
from nvium_core.engine.device.attention import in_place
from nvium_core.engine.device.graphs import GraphsBackend, passes
from nvium_core.engine.device.graphs.backend import EMITTED, LOG_CONTINUE, LOG_EXIT
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.device.native import NativeBackend
from nvium_core.engine.device.native.steps import GOES_ON, OUTCOME, BlockShape, NativeStep
from nvium_core.engine.device.paged_cache import PAGE_SIZE
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.model.nvium import NviumForCausalLM

SCHEDULES: tuple[Schedule, ...] = ("synchronous", "sweep")
"""Whole passes, and a block at a time."""

Path = Literal["native", "graphs"]

CONTEXT = 1000
"""About how many tokens a sequence has at its end, if the model's context allows."""


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


class GraphsStub(Stub, Replay):
    """In place of a model's graphs: leaves the answers that they would."""

    def __init__(self, model: NviumForCausalLM, backend: GraphsBackend) -> None:
        Stub.__init__(self, model.config.num_exits)
        Replay.__init__(self, torch.device("cpu"))
        self._answers, self._of_passes = backend.answers, backend.passes.answers
        num_rows = self._answers.shape[1]
        self._of_passes[:, passes.EXIT_TAKEN] = torch.tensor([self._first_exit() for _ in range(num_rows)])
        self._answers[EMITTED] = self._of_passes[:, passes.EMITTED] = 1
        self._answers[LOG_CONTINUE] = -1

    def _first_exit(self) -> int:
        return next(block for block in range(len(self._exits)) if self.exits(block))

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        started = time.thread_time()
        if isinstance(name, tuple) and name[0] == "route":
            self._answers[LOG_EXIT] = math.log(self._exits[name[1]])
        self.seconds += time.thread_time() - started


def measure(
    subject: Subject, *, sequences: Sequence[int] = (1, 8, 32, 64, 256), tokens: int = 64, repeats: int = 5
) -> Figures:
    """A row for each path, number of sequences and schedule."""
    prompt = (min(CONTEXT, subject.context) - tokens - 1) // PAGE_SIZE * PAGE_SIZE + 1
    paths: list[Path] = ["native", "graphs"] if native.knows(subject.model) else ["graphs"]
    cases = [Case(*each, prompt, tokens, subject.model) for each in product(paths, sequences, SCHEDULES)]
    for _ in range(1 + repeats):
        for case in cases:
            case.turn()
    return {"prompt_tokens": prompt, "tokens": tokens, "repeats": repeats, "rows": [case.figures for case in cases]}


class Case:
    """An engine without a device, and what its turns took."""

    def __init__(
        self, path: Path, num_sequences: int, schedule: Schedule, prompt: int, tokens: int, model: NviumForCausalLM
    ) -> None:
        self.path = path
        self.num_sequences = num_sequences
        self.schedule: Schedule = schedule
        self._tokens = tokens
        self._prompts = [[number % model.config.vocab_size] * prompt for number in range(num_sequences)]
        self._turns: list[tuple[float, int]] = []
        config = EngineConfig(
            schedule=schedule,
            max_sequences=num_sequences,
            max_rows_per_step=max(256, num_sequences),
            cache_tokens=num_sequences * (prompt + tokens + PAGE_SIZE),
            page_size=PAGE_SIZE,
        )
        self._engine, self._stub = (with_native_stub if path == "native" else with_graphs_stub)(model, config)

    def turn(self) -> None:
        engine, stub = self._engine, self._stub
        params = SamplingParams(max_tokens=self._tokens, seed=len(self._turns), ignore_eos=True)
        for number, prompt in enumerate(self._prompts):
            engine.add(str(number), prompt, params)
        while any(not sequence.num_generated for sequence in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        stub.seconds, steps, started = 0.0, 0, time.thread_time()
        while engine.has_work:
            engine.step()
            steps += 1
        self._turns.append((time.thread_time() - started - stub.seconds, steps))

    @property
    def figures(self) -> Figures:
        turns = self._turns[1:]
        of_steps = [1e6 * own / steps for own, steps in turns]
        tokens = self.num_sequences * self._tokens
        return {
            "path": self.path,
            "sequences": self.num_sequences,
            "schedule": self.schedule,
            "step_us": min(of_steps),
            "median_step_us": median(of_steps),
            "token_us": min(1e6 * own / tokens for own, _ in turns),
            "steps": round(median(steps for _, steps in turns)),
        }


def with_native_stub(model: NviumForCausalLM, config: EngineConfig) -> tuple[Engine, Stub]:
    engine, stub = Engine(model, config), NativeStub(model.config.num_exits)
    backend = engine.runner.backend
    assert isinstance(backend, NativeBackend)
    backend.steps.run_native = stub
    backend.max_native_rows = sys.maxsize
    return engine, stub


def with_graphs_stub(model: NviumForCausalLM, config: EngineConfig) -> tuple[Engine, Stub]:
    make_backend = partial(GraphsBackend, attention=in_place)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    backend = engine.runner.backend
    assert isinstance(backend, GraphsBackend)
    stub = GraphsStub(model, backend)
    backend.replay = backend.passes.replay = stub
    backend.forward = lambda *_: None  # type: ignore[method-assign]  # prompts' rows, which are not measured
    return engine, stub


def table(figures: Figures) -> Table:
    columns = "path", "sequences", "schedule", "µs a step", "median", "µs a token"
    result = Table(*columns, caption="Without the device's work.")
    for row in figures["rows"]:
        times = f"{row['step_us']:.0f}", f"{row['median_step_us']:.0f}", f"{row['token_us']:.1f}"
        result.add_row(row["path"], str(row["sequences"]), row["schedule"], *times)
    return result
