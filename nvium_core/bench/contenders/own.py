"""Our engine as a contender."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from nvium_core.bench.contenders.contender import Contender, Generation, Workload
from nvium_core.bench.harness import Subject, timed
from nvium_core.choices import Schedule
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.paged_cache import best_page_size
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.policies import policies_of
from nvium_core.engine.schedule.tuner import Tuner
from nvium_core.engine.validation import require
from nvium_core.model.nvium import Nvium

WARM_UP_TURNS, WARM_UP_TOKENS = 2, 320
"""Warm-up of the schedule `race`: turns, and tokens per sequence. Afterwards `race` has chosen its faster schedule."""


def workloads(subject: Subject, sequences: Iterable[int], tokens: int) -> list[Workload]:
    """Return a workload for each number in `sequences`. Raise `InvalidRequest` if `tokens` exceeds the context."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"must be at most {room}, the context after the prompt, got {tokens}")
    return [Workload(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]


def engine_for(model: Nvium, workload: Workload, *others: Workload, **config: Any) -> Engine:
    """Build an engine without prefix caching. Its KV cache has room for all sequences of the workload.

    Also for `others`, which need no warm-up.
    """
    page_size = best_page_size(model.device)

    def cache_tokens(each: Workload, num_positions: int) -> int:
        return each.num_sequences * (-(-num_positions // page_size) + 1) * page_size

    warm = max(workload.num_positions, len(workload.prompt) + WARM_UP_TOKENS)
    room = max(cache_tokens(workload, warm), *(cache_tokens(each, each.num_positions) for each in others), 0)
    max_sequences = max(each.num_sequences for each in (workload, *others))
    return Engine(model, EngineConfig(max_sequences=max_sequences, cache_tokens=room, prefix_caching=False, **config))


def contender(engine: Engine, workload: Workload, schedule: Schedule) -> Contender:
    """Return a contender that runs `engine` with `schedule`. It samples from the exits at temperature 1.

    With `race`, a warm-up runs here, so that `race` has chosen a schedule before the first turn. Contenders that share
    an engine choose independently.
    """
    policies = policies_of(schedule, engine.scheduler.num_blocks, is_tied=engine.scheduler.is_tied)
    tuner = Tuner(policies, first_pause=0)

    def generate(turn: int, num_tokens: int) -> Generation:
        engine.scheduler.schedules = tuner
        params = partial(SamplingParams, sampling="exits", max_tokens=num_tokens, ignore_eos=True)
        return timed(engine, [(workload.prompt, params(seed=seed)) for seed in workload.seeds(turn)])

    for turn in range(WARM_UP_TURNS if len(policies) > 1 else 0):
        generate(turn, min(WARM_UP_TOKENS, engine.context - len(workload.prompt)))
    return partial(generate, num_tokens=workload.num_tokens)
