"""A text spoken through the engine, with the exit of every token and the time it took. Knows token ids only."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nvium_core.bench.harness import sound
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SpokenToken:
    """A token, its exit (from 1) with p_k, and the seconds since the token before it, or since the prompt came."""

    token_id: int
    exit: int
    exit_probability: float
    seconds: float


def speak(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[SpokenToken]:
    """Continue a prompt on an idle engine. Raises `EngineError` if it fails."""
    last = time.perf_counter()
    engine.add("spoken", list(prompt), params)
    spoken = list[SpokenToken]()
    while engine.has_work:
        events, now = engine.step(), time.perf_counter()
        for event in map(sound, events):
            spoken.append(SpokenToken(event.token_id, event.exit, event.exit_probability, now - last))
            last = now
    return spoken
