"""Host overhead of a Step outside the runner, measured by short generations on an idle engine."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nvium_core.engine.device.budget import Budget
from nvium_core.engine.params import SamplingParams

if TYPE_CHECKING:
    from nvium_core.engine.engine import Engine

NUM_SEQUENCES = (2, 8)
NUM_TOKENS = 24


def rehearsed(engine: "Engine", budget: Budget) -> Iterator[tuple[int, float]]:
    """Runs of Steps of several sequences, and the engine's own seconds of each, until the budget ends."""
    room = min(engine.context, engine.pool.num_pages * engine.pool.page_size) - 1
    for number in NUM_SEQUENCES:
        for seed in range(number if number <= engine.config.max_sequences else 0):
            params = SamplingParams(max_tokens=min(NUM_TOKENS, room), seed=seed, ignore_eos=True)
            engine.add(f"rehearsal-{seed}", [0], params)
        taken = 0.0
        while engine.has_work:
            if not budget.allows(taken):
                for seed in range(number):
                    engine.cancel(f"rehearsal-{seed}")
                return
            started = time.monotonic()
            engine.step()
            taken = time.monotonic() - started
            if len(engine.reports) == 1:
                yield engine.reports[0].num_sequences, taken - engine.runner_seconds
