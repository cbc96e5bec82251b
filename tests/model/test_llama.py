"""A Hugging Face Llama is an N-vium with one exit and no adapter; its outputs equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from nvium_core import NviumForCausalLM
from tests.model.llama_folders import LLAMA_3_ROPE, llama_folder, random_llama

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 4},
    "one-key-head": {"num_key_value_heads": 1},
    "llama-3-rope": {"rope_parameters": LLAMA_3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "tied": {"tie_word_embeddings": True},
    "biased-wide-heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
}


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LlamaForCausalLM, NviumForCausalLM]:
    llama = random_llama(**VARIANTS[request.param])
    return llama, NviumForCausalLM.from_pretrained(llama_folder(tmp_path, llama), dtype=torch.float32)


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_llama_gives_the_log_probabilities_of_transformers(pair: tuple[LlamaForCausalLM, NviumForCausalLM]) -> None:
    llama, univium = pair
    input_ids = random_ids(2, 40)
    assert univium.config.num_exits == 1
    expected = llama(input_ids).logits.log_softmax(-1)
    torch.testing.assert_close(univium(input_ids).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_left_padding_changes_nothing(pair: tuple[LlamaForCausalLM, NviumForCausalLM]) -> None:
    llama, univium = pair
    input_ids = random_ids(2, 12)
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask, "position_ids": positions}
    expected = llama(input_ids, **inputs).logits.log_softmax(-1)
    found = univium(input_ids, **inputs).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
    alone = univium(input_ids[:1, 5:]).logits
    torch.testing.assert_close(found[:1, 5:], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_greedy_generation_is_that_of_transformers(pair: tuple[LlamaForCausalLM, NviumForCausalLM]) -> None:
    llama, univium = pair
    input_ids = random_ids(2, 9)
    mask = torch.ones_like(input_ids)
    mask[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = llama.generate(input_ids, **options)
    assert expected.shape == (2, 21)
    assert torch.equal(univium.generate(input_ids, **options), expected)


@torch.no_grad()
def test_a_cache_changes_nothing(pair: tuple[LlamaForCausalLM, NviumForCausalLM]) -> None:
    _, univium = pair
    input_ids = random_ids(1, 20)
    whole = univium(input_ids).logits
    first = univium(input_ids[:, :7], use_cache=True)
    second = univium(input_ids[:, 7:19], past_key_values=first.past_key_values)
    third = univium(input_ids[:, 19:], past_key_values=second.past_key_values)
    pieces = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_are_kept_for_the_last_positions_only_when_asked(tmp_path: Path) -> None:
    univium = NviumForCausalLM.from_pretrained(llama_folder(tmp_path, random_llama()))
    input_ids = random_ids(2, 6)
    assert torch.equal(univium(input_ids, logits_to_keep=2).logits, univium(input_ids).logits[:, -2:])
