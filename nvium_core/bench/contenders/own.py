"""Our engine as a contender."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from nvium_core.bench.contenders.contender import Contender, Generation, Race
from nvium_core.bench.harness import Subject, Timed, timed
from nvium_core.choices import Schedule
from nvium_core.engine.device.paged_cache import best_page_size
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.schedule import race as schedules
from nvium_core.engine.schedule.scheduler import WAYS
from nvium_core.model.nvium import Nvium

WARM_UP_TURNS, WARM_UP_TOKENS = 2, 320
"""Tokens of each sequence before a race of schedules is measured: enough to decide it."""


def races(subject: Subject, sequences: Iterable[int], tokens: int) -> list[Race]:
    """A race for each number of sequences. Raises `InvalidRequest` for more tokens than the context holds."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    return [Race(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]


def engine_for(model: Nvium, race: Race, **config: Any) -> Engine:
    """An engine whose cache holds every sequence and shares no prefixes."""
    page_size = best_page_size(model.lm_head.weight)
    num_positions = max(race.num_positions, len(race.prompt) + WARM_UP_TOKENS)
    cache_tokens = race.num_sequences * (-(-num_positions // page_size) + 1) * page_size
    room = EngineConfig(max_sequences=race.num_sequences, cache_tokens=cache_tokens, prefix_caching=False, **config)
    return Engine(model, room)


def contender(engine: Engine, race: Race, schedule: Schedule, asked: SamplingParams | None = None) -> Contender:
    """Our engine with this schedule and these sampling parameters (None is temperature 1). A race of schedules is
    decided before the first turn; contenders on one engine do not share its result."""
    asked = asked or SamplingParams(sampling="exits")
    own = schedules.Race(WAYS[schedule] if engine.scheduler.num_blocks > 1 else ("whole",))

    def generate(turn: int, num_tokens: int) -> Timed:
        engine.scheduler.schedules = own
        params = [replace(asked, max_tokens=num_tokens, seed=seed, ignore_eos=True) for seed in race.seeds(turn)]
        return timed(engine, [(race.prompt, each) for each in params])

    def generate_turn(turn: int) -> Generation:
        run = generate(turn, race.num_tokens)
        return Generation(
            seconds=run.seconds,
            first_token_seconds=run.first_token_seconds,
            token_ids=[completion.token_ids for completion in run.completions],
            exits=Counter(chain.from_iterable(completion.exits for completion in run.completions)),
        )

    for turn in range(WARM_UP_TURNS if own.is_open else 0):
        generate(turn, min(WARM_UP_TOKENS, engine.context - len(race.prompt)))
    return generate_turn
