"""Our engine as a contender."""

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

from nvium_core.bench.contenders.contender import Contender, Generation, Race
from nvium_core.bench.harness import timed
from nvium_core.choices import Schedule
from nvium_core.engine.device.paged_cache import best_page_size
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies
from nvium_core.engine.schedule.policies import POLICIES, Policy
from nvium_core.model.nvium import NviumForCausalLM


def engine_for(model: NviumForCausalLM, race: Race, **config: Any) -> Engine:
    """The cache has room for every sequence, and no prefix is found in it."""
    page_size = best_page_size(model.lm_head.weight)
    pages = -(-race.num_positions // page_size) + 1
    cache_tokens = race.num_sequences * pages * page_size
    room = EngineConfig(max_sequences=race.num_sequences, cache_tokens=cache_tokens, prefix_caching=False, **config)
    return Engine(model, room)


def policy_for(engine: Engine, schedule: Schedule) -> Policy:
    """Another for a calibrated engine, which shares nothing that it learns."""
    assert engine.costs
    return POLICIES[schedule].of(engine.costs.copy(), ExitFrequencies.even(engine.model_config.num_exits))


def contender(
    engine: Engine, race: Race, policy: Policy | None = None, asked: SamplingParams | None = None
) -> Contender:
    """With this schedule and these draws; None is the engine's own schedule, and temperature 1."""
    policy, asked = policy or engine.scheduler.policy, asked or SamplingParams()

    def generate_turn(turn: int) -> Generation:
        engine.scheduler.policy = policy
        policy.wait()
        params = [replace(asked, max_tokens=race.num_tokens, seed=seed, ignore_eos=True) for seed in race.seeds(turn)]
        run = timed(engine, [(race.prompt, each) for each in params])
        return Generation(
            seconds=run.seconds,
            first_token_seconds=run.first_token_seconds,
            token_ids=[completion.token_ids for completion in run.completions],
            exits=Counter(chain.from_iterable(completion.exits for completion in run.completions)),
        )

    return generate_turn
