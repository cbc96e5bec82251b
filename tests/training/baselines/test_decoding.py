"""Plain decoding: rows through a cache say what a full forward pass would say."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nvium_core.model.llama import causal_attention
from nvium_core.training.baselines.decoding import Decoding, Generated, draw
from nvium_core.training.baselines.univium import UniviumForCausalLM, generate
from tests.training.baselines.small_models import small_univium

MODEL = small_univium()


@torch.no_grad()
def greedy(model: UniviumForCausalLM, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """A full forward pass per token."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt_ids) :]


@settings(max_examples=15)
@given(prompt_ids=st.lists(st.integers(0, 16), min_size=1, max_size=8), max_tokens=st.integers(1, 12))
def test_greedy_tokens_are_those_of_full_forward_passes(prompt_ids: list[int], max_tokens: int) -> None:
    generated = generate(MODEL, prompt_ids, max_tokens)
    assert generated.token_ids == greedy(MODEL, prompt_ids, max_tokens)
    assert generated.exit_layers == [4] * max_tokens


@settings(max_examples=15)
@given(
    cuts=st.sets(st.integers(1, 9)),
    token_ids=st.lists(st.integers(0, 16), min_size=10, max_size=10),
    split=st.booleans(),
)
@torch.no_grad()
def test_rows_may_come_in_any_portions(cuts: set[int], token_ids: list[int], split: bool) -> None:
    decoding, states = Decoding(MODEL, token_ids, 1), []
    for first, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 10], strict=True):
        h_RD = decoding.embed(token_ids[first:stop])
        for layers in (range(2), range(2, 4)) if split else (range(4),):
            h_RD = decoding.run(h_RD, layers, first)
        states.append(h_RD)
    positions_BT = torch.arange(10)[None]
    (expected_BTD,) = MODEL.hidden_states(torch.tensor([token_ids]), positions_BT, causal_attention())
    torch.testing.assert_close(torch.cat(states), expected_BTD[0])


def test_a_row_that_is_run_again_replaces_what_was_there() -> None:
    decoding = Decoding(MODEL, [1, 2, 3], 1)
    with torch.no_grad():
        decoding.run(decoding.embed([1, 2, 9]), range(4), 0)
        again_RD = decoding.run(decoding.embed([3]), range(4), 2)
        expected_RD = Decoding(MODEL, [1, 2, 3], 1).run(decoding.embed([1, 2, 3]), range(4), 0)
    torch.testing.assert_close(again_RD[0], expected_RD[2])


def test_tokens_are_drawn_in_proportion_to_their_weights() -> None:
    rng, weights = random.Random(0), torch.tensor([0.5, 0.0, 2.0, 1.5])
    counts = Counter(draw(weights, rng) for _ in range(2000))
    assert 1 not in counts
    assert chisquare([counts[0], counts[2], counts[3]], [250, 1000, 750]).pvalue > 0.001


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        generate(MODEL, [1] * 60, 5)
    with pytest.raises(ValueError, match="at least 1"):
        generate(MODEL, [], 5)
    assert len(generate(MODEL, [1] * 60, 4).token_ids) == 4


def test_time_is_told_per_token() -> None:
    assert Generated([1, 2], [4, 4], seconds=0.5).milliseconds_per_token == 250
    assert generate(MODEL, [1], 2).seconds > 0
