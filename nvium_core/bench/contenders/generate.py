"""transformers' `generate` as a contender. The prompts of a batch are equal, so they need no padding."""

import time
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from nvium_core.bench.contenders.contender import Contender, Generation, Workload

Cache = Literal["dynamic", "static"]
"""The KV cache: dynamic grows with every token, static has its full length from the start."""


class TokenTimes(BaseStreamer):
    """Records when tokens arrive. The first time is that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing. `BaseStreamer` requires this method."""


def contender(llama: LlamaForCausalLM, workload: Workload, cache: Cache) -> Contender:
    prompts_BT = torch.tensor([workload.prompt] * workload.num_sequences, device=llama.device)
    model: Any = llama
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=workload.num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
    )

    def generate_turn(turn: int) -> Generation:
        torch.manual_seed(turn)
        arrivals = TokenTimes()
        started = time.perf_counter()
        output_BT: Tensor = model.generate(
            prompts_BT, attention_mask=torch.ones_like(prompts_BT), generation_config=config, streamer=arrivals
        )
        token_ids = output_BT[:, len(workload.prompt) :].tolist()
        seconds = time.perf_counter() - started
        first = arrivals.times[1] - started
        return Generation(seconds=seconds, first_token_seconds=[first] * workload.num_sequences, token_ids=token_ids)

    return generate_turn
