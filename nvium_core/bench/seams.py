"""Where the time of the engine's steps goes: each of its parts timed by itself, without what it calls of the others.

A part is a method of the engine, its runner or its model, found by name; a stopwatch takes its place while the engine
is watched. The table is all that has to change when the engine's parts do. On a GPU a part's time is that of the host.
"""

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.native import NativeBackend
from nvium_core.engine.device.native.steps import NativeStep, NativeSteps
from nvium_core.engine.engine import Engine

SEAMS = (
    ("step", "", "step"),
    ("schedule", "scheduler", "schedule"),
    ("gather", "runner", "run"),
    ("layers", "runner.model.model", "run"),
    ("layers", "runner.model.model", "rotary"),
    ("layers", "runner.model.model.embed_tokens", "forward"),
    ("attention", "runner.cache", "attend"),
    ("junction", "runner", "_decide"),
    ("router", "runner.model.exits.{exit}.norm", "forward"),
    ("router", "runner.model.exits.{exit}", "route"),
    ("head", "runner.model.exits.{exit}.adapter", "forward"),
    ("head", "runner.model.lm_head", "forward"),
    ("draw", "runner.backend", "draw"),
    ("record", "_recorder", "record"),
    ("record", "", "_report"),
)
"""(part, owner's path from the engine, method); a path with {exit} stands for every exit's."""

NATIVE_SEAMS = (
    ("layers", "runner.backend.steps", "_run"),
    ("router", "runner.backend.fronts", "_route"),
    ("head", "runner.backend.fronts", "_speak"),
)
"""The native calls, attention among the layers and draws in the head, of an engine that has them. `_run` takes whole
Steps and tells how long routers and heads took of it."""

GRAPH_SEAMS = (("layers", "runner.backend.replay", "run"),)
"""All that is replayed or called over fixed buffers, junctions included, of an engine that has them."""

KERNELS = ("layers", "attention", "router", "head")
"""The parts that are the model's own work; all else is the engine's."""

PARTS = tuple(dict.fromkeys(part for part, _, _ in SEAMS))


class Stopwatch:
    """Seconds and calls by part. Only one part's clock runs at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._running = ""
        self._since = time.perf_counter()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, on the part's clock."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls[part] += 1
            interrupted = self._switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(interrupted)

        return timed

    def around_steps(self, run: Callable[..., int]) -> Callable[..., int]:
        """The same for `NativeSteps._run`: what routers and heads took is theirs."""
        timed = self.around("layers", run)

        def divided(first: Any, *args: Any) -> int:
            count = timed(first, *args)
            steps = ctypes.cast(first, ctypes.POINTER(NativeStep))
            for part in ("router", "head"):
                seconds = sum(getattr(steps[i], f"{part}_seconds") for i in range(count))
                self.seconds["layers"] -= seconds
                self.seconds[part] += seconds
                self.calls[part] += 1
            return count

        return divided

    def _switch(self, part: str) -> str:
        now = time.perf_counter()
        self.seconds[self._running] += now - self._since
        interrupted, self._running, self._since = self._running, part, now
        return interrupted


@contextmanager
def watched(engine: Engine) -> Iterator[Stopwatch]:
    """A stopwatch for all that the engine does meanwhile."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for part, path, method in seams(engine):
            owner = attrgetter(path)(engine) if path else engine
            original = getattr(owner, method)
            if method in vars(owner):
                stack.callback(setattr, owner, method, original)
            else:
                stack.callback(delattr, owner, method)
            is_whole = isinstance(owner, NativeSteps)
            setattr(owner, method, watch.around_steps(original) if is_whole else watch.around(part, original))
        yield watch


def seams(engine: Engine) -> Iterator[tuple[str, str, str]]:
    """The tables, with a line for each exit where they say so."""
    native = NATIVE_SEAMS if isinstance(engine.runner.backend, NativeBackend) else ()
    graphs = GRAPH_SEAMS if isinstance(engine.runner.backend, GraphsBackend) else ()
    for part, path, method in (*SEAMS, *native, *graphs):
        exits = range(engine.model_config.num_exits) if "{exit}" in path else range(1)
        for exit_ in exits:
            yield part, path.format(exit=exit_), method
