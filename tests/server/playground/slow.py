"""Slow and failing servers."""

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.server.live_server import LiveServer


def slowed_down(server: LiveServer, **options: Any) -> LiveServer:
    server.service.engine.runner = SlowRunner(server.service.engine.runner, **options)
    return server


class SlowRunner:
    """Runs the engine with one token per Step and a pause before each Step. Fails after `num_steps`."""

    def __init__(self, runner: Any, num_steps: float = math.inf) -> None:
        self._runner = runner
        self._num_steps = num_steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: Any) -> Iterable[Any]:
        time.sleep(0.05)
        self._num_steps -= 1
        if self._num_steps < 0:
            raise RuntimeError("out of order")
        return self._runner.run(replace(step, seconds=0.0))
