"""The dense baseline as a Llama: a univium saved as a standard Llama folder.

It is trained elsewhere: LayerSkip is a Llama too.
"""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.baselines.decoding import Decoding, Generated, choose, head_logits

LLAMA_NORM, OUR_NORM = "model.norm.weight", "exits.0.norm.weight"


class UniviumForCausalLM(NviumForCausalLM):
    """One exit, at the end, without adapter: a Llama."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Write a folder of `LlamaForCausalLM`, which this class and its base load too. `options` are transformers'."""
        as_llama(self).save_pretrained(save_directory, **options)


def univium_config(config: NviumConfig) -> NviumConfig:
    """The univium with an N-vium's shape."""
    own = {"exit_layers": None, "adapter_hidden_size": 0, "drafter_hidden_size": 0}
    return NviumConfig(**(shape_fields(config) | own))


def shape_fields(config: NviumConfig) -> dict[str, Any]:
    """The fields that configurations of all kinds share."""
    return {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}


def as_llama(model: NviumForCausalLM) -> LlamaForCausalLM:
    """As transformers' own class, sharing the weights."""
    names = {field.name for field in fields(LlamaConfig)} - {"architectures"}
    config = LlamaConfig(**{name: value for name, value in model.config.to_dict().items() if name in names})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    tensors = model.state_dict()
    llama.load_state_dict({LLAMA_NORM: tensors.pop(OUR_NORM)} | tensors, assign=True)
    return llama


@torch.inference_mode()
def generate(
    model: NviumForCausalLM, prompt_ids: Sequence[int], max_tokens: int, rng: random.Random | None = None
) -> Generated:
    """Exactly `max_tokens` tokens through all layers: greedy, or sampled with a generator. Raises `ValueError` if they
    do not fit into the context."""
    started = time.perf_counter()
    decoding, depth = Decoding(model, prompt_ids, max_tokens), model.config.num_hidden_layers
    decoding.read_prompt()
    for _ in range(max_tokens):
        h_RD = decoding.run(decoding.embed(decoding.token_ids[-1:]), range(depth), decoding.front)
        decoding.token_ids.append(choose(head_logits(model, -1, h_RD[-1]), rng))
    token_ids = decoding.token_ids[len(prompt_ids) :]
    return Generated(token_ids, [depth] * max_tokens, time.perf_counter() - started)
