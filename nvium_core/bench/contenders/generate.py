"""transformers' `generate`: a batch of equal prompts, so no padding, and a key/value cache."""

import time
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from nvium_core.bench.contenders.contender import Contender, Generation, Race

Cache = Literal["dynamic", "static"]
"""A cache that grows with every token, or one of the full length."""


class FirstToken(BaseStreamer):
    """Records the time of the first token; transformers streams the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Required by the interface."""

    def seconds_since(self, started: float) -> float:
        return self.times[1] - started


def plain_sampling(num_tokens: int) -> GenerationConfig:
    """Temperature 1, no truncation, no end-of-text."""
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0, **whole)


def contender(llama: LlamaForCausalLM, race: Race, cache: Cache) -> Contender:
    prompts_BT = torch.tensor([race.prompt] * race.num_sequences, device=llama.device)
    speaker: Any = llama
    config = plain_sampling(race.num_tokens)
    config.cache_implementation = cache

    def generate_turn(turn: int) -> Generation:
        torch.manual_seed(turn)
        first = FirstToken()
        started = time.perf_counter()
        spoken_BT: Tensor = speaker.generate(
            prompts_BT, attention_mask=torch.ones_like(prompts_BT), generation_config=config, streamer=first
        )
        token_ids = spoken_BT[:, len(race.prompt) :].tolist()
        seconds = time.perf_counter() - started
        return Generation(
            seconds=seconds,
            first_token_seconds=[first.seconds_since(started)] * race.num_sequences,
            token_ids=token_ids,
        )

    return generate_turn
