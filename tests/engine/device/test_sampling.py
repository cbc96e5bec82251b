"""The vectorised sampler against the reference's plain Python."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nvium_core.engine.device.sampling import (
    NO_TOKEN,
    NOT_DRAWN,
    Truncation,
    certified_argmax,
    draw,
    draw_unread,
    inverse_cdf,
    truncate_all,
    truncate_candidates,
)
from nvium_core.engine.params import SamplingParams
from nvium_core.model.reference import Params, invert, truncated


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


logit_rows = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5]) | st.floats(-8, 8, width=32), min_size=5, max_size=5)


wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.9]),
        "top_k": st.integers(0, 7),
        "top_p": st.sampled_from([0.05, 0.35, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    }
)
rows = st.tuples(logit_rows, wishes, st.floats(0, 1, exclude_max=True))


def truncation(*params: SamplingParams) -> Truncation:
    return Truncation.of([each.draw for each in params], torch.device("cpu"))


def is_between_two(weights: list[float], uniform: float) -> bool:
    """As 1/3 is for three tokens alike: rounding says which of two tokens it means."""
    total = sum(weights)
    return any(mass > 0 and abs(mass / total - uniform) < 1e-12 for mass in accumulate(weights))


@given(st.lists(rows, min_size=1, max_size=6))
def test_draws_equal_the_reference_row_by_row(rows: list[tuple[list[float], dict[str, Any], float]]) -> None:
    logits, asked, uniform = zip(*rows, strict=True)
    params = truncation(*(SamplingParams(**wishes) for wishes in asked))
    weights = [truncated(row, Params(**wishes)) for row, wishes, _ in rows]
    assume(not any(map(is_between_two, weights, uniform)))
    tokens = draw(float64(logits), params, float64(uniform)).tolist()
    assert tokens == [*map(invert, weights, uniform)]


FEW_OF_MANY = st.lists(st.sampled_from([-9.0, -2.0, -1.0, 0.0]) | st.floats(-8, 8), min_size=30, max_size=30)


@given(st.lists(st.tuples(FEW_OF_MANY, wishes), min_size=1, max_size=4))
def test_candidates_are_truncated_as_the_whole_vocabulary_is(rows: list[tuple[list[float], dict[str, Any]]]) -> None:
    logits, asked = zip(*rows, strict=True)
    params = replace(truncation(*(SamplingParams(**wishes) for wishes in asked)), num_candidates=7)
    probs = float64(logits).softmax(-1)
    found, is_enough_R = truncate_candidates(probs, params)
    assert torch.equal(found[is_enough_R], truncate_all(probs, params)[is_enough_R])
    for is_enough, each in zip(is_enough_R.tolist(), asked, strict=True):
        assert is_enough or (each["top_k"] == 0 and each["top_p"] < 1)


@given(st.lists(st.tuples(FEW_OF_MANY, wishes), min_size=1, max_size=4), st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_unread_is_the_same_or_says_that_it_is_not_drawn(
    rows: list[tuple[list[float], dict[str, Any]]], uniform: float
) -> None:
    logits, asked = zip(*rows, strict=True)
    params = replace(truncation(*(SamplingParams(**wishes) for wishes in asked)), num_candidates=4)
    uniforms = float64([uniform] * len(rows))
    found, expected = (way(float64(logits), params, uniforms).tolist() for way in (draw_unread, draw))
    for token, same, each in zip(found, expected, asked, strict=True):
        is_sure = (0 < each["top_k"] <= 4) or (each["top_k"] == 0 and each["top_p"] == 1)
        assert token == same or (token == NOT_DRAWN and not is_sure)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("asked", [{"top_k": 40}, {"top_p": 0.6}, {"top_k": 300, "top_p": 0.9}, {}])
def test_a_large_vocabulary_gives_the_same_tokens(temperature: float, asked: dict[str, Any]) -> None:
    """Those of 1,024 candidates, or where they do not hold top-p, of all."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 5000, generator=generator, dtype=torch.float64).round(decimals=1) * 2
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    each = [SamplingParams(temperature=temperature, **asked), SamplingParams(top_p=0.5, temperature=0.3)] * 32
    params = truncation(*each)
    assert params.num_candidates == 1024
    assert torch.equal(draw(logits, params, uniform), draw(logits, replace(params, num_candidates=0), uniform))


def test_a_row_that_is_no_distribution_is_told_among_candidates() -> None:
    logits = torch.zeros(2, 40, dtype=torch.float64)
    logits[0, 7] = torch.nan
    tokens = draw(logits, truncation(*[SamplingParams(top_k=3)] * 2), float64([0.5, 0.5]))
    assert tokens.tolist() == [NO_TOKEN, 1]


@given(st.lists(logit_rows, min_size=1, max_size=4), st.floats(0, 1, exclude_max=True), wishes)
def test_temperature_0_takes_the_most_probable_token(
    logits: list[list[float]], uniform: float, wishes: dict[str, Any]
) -> None:
    params = SamplingParams(**{**wishes, "temperature": 0})
    tokens = draw(float64(logits), truncation(*[params] * len(logits)), float64([uniform] * len(logits)))
    assert tokens.tolist() == [row.index(max(row)) for row in logits]


def test_equal_logits_are_truncated_to_the_lowest_ids() -> None:
    for uniform, token in ((0.0, 0), (0.49, 0), (0.51, 1), (0.999999, 1)):
        tokens = draw(torch.zeros(1, 6), truncation(SamplingParams(top_k=2)), float64([uniform]))
        assert tokens.tolist() == [token]


def test_min_p_keeps_tokens_of_just_that_share_of_the_most_probable() -> None:
    logits = float64([[0.0, math.log(0.5), math.log(0.49), 0.0]])
    params = truncation(SamplingParams(min_p=0.495))
    drawn = {int(draw(logits, params, float64([u / 100]))) for u in range(100)}
    assert drawn == {0, 1, 3}


def test_the_most_probable_token_survives_any_top_p() -> None:
    params = truncation(SamplingParams(temperature=2.0, top_k=1, top_p=5e-324))
    assert draw(torch.tensor([[0.0, 3.0, 1.0]]), params, float64([0.9])).tolist() == [1]


def test_an_impossible_token_is_never_drawn_and_hides_no_other() -> None:
    logits = float64([[-torch.inf, 0.0, -torch.inf, 0.0]])
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.9, min_p=0.1, temperature=0.5)):
        drawn = [int(draw(logits, truncation(params), float64([u]))) for u in (0.0, 0.49, 0.51, 1 - 2.0**-53)]
        assert drawn == [1, 1, 3, 3]


def test_a_row_of_impossible_tokens_draws_no_token() -> None:
    logits = float64([[-torch.inf, -torch.inf], [0.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0)):
        assert draw(logits, truncation(params, params), float64([0.3, 0.9])).tolist() == [NO_TOKEN, 1]


def test_a_token_without_probability_is_never_drawn() -> None:
    probs = float64([[0.0, 0.5, 0.0, 0.5, 0.0]])
    almost_one = 1 - 2.0**-53
    assert [inverse_cdf(probs, float64([u])).item() for u in (0.0, 0.5, almost_one)] == [1, 3, 3]


def test_a_distribution_that_is_none_draws_no_token() -> None:
    assert inverse_cdf(float64([[0.5, torch.nan]]), float64([0.0])).tolist() == [NO_TOKEN]


def test_the_argmax_is_certain_only_when_the_rest_cannot_overturn_it() -> None:
    partial = float64([[0.5, 0.2, 0.1], [0.5, 0.2, 0.1]])
    token, certain = certified_argmax(partial, float64([0.2, 0.3]))
    assert token.tolist() == [0, 0]
    assert certain.tolist() == [True, False]


def test_ties_of_the_argmax_go_to_the_lowest_id() -> None:
    token, _ = certified_argmax(float64([[0.1, 0.4, 0.4]]), float64([0.0]))
    assert token.tolist() == [1]
