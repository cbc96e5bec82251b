"""transformers' continuous batching: requests submitted together, over paged attention."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from nvium_core.bench.contenders.contender import Contender, ContenderFailed, Generation, Race
from nvium_core.bench.contenders.generate import plain_sampling

PATIENCE_SECONDS = 600
"""Limit for one answer."""


@contextmanager
def contender(llama: LlamaForCausalLM, race: Race) -> Iterator[Contender]:
    """The manager runs a thread of its own meanwhile. It changes how the model attends, so it needs its own model."""
    generation = plain_sampling(race.num_tokens)
    generation.eos_token_id = -1
    manager: Any = llama.init_continuous_batching(generation, cache_for(race))
    manager.start()

    def generate_turn(turn: int) -> Generation:
        started = time.perf_counter()
        manager.add_requests([race.prompt] * race.num_sequences, record_timestamps=True)
        answers = [manager.get_result(timeout=PATIENCE_SECONDS) for _ in range(race.num_sequences)]
        seconds = time.perf_counter() - started
        for answer in answers:
            if answer is None or answer.error is not None:
                raise ContenderFailed(f"continuous batching: {answer.error if answer else 'no answer'}")
        return Generation(
            seconds=seconds,
            first_token_seconds=[answer.timestamps[0] - started for answer in answers],
            token_ids=[answer.generated_tokens for answer in answers],
        )

    try:
        yield generate_turn
    finally:
        manager.stop(block=True)


def cache_for(race: Race) -> ContinuousBatchingConfig:
    """Blocks for all sequences, none shared, and batches that take all prompts at once. The default would ask the
    device for its size."""
    config = ContinuousBatchingConfig()
    blocks = -(-race.num_positions // config.page_size) + 1
    config.num_blocks = race.num_sequences * blocks
    config.max_batch_tokens = race.num_sequences * len(race.prompt)
    config.max_requests_per_batch = race.num_sequences
    config.allow_block_sharing = False
    return config
