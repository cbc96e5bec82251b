"""The vectorized sampler against the reference in plain Python."""

from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nvium_core.engine.device.sampling import NO_TOKEN, certified_argmax, draw, first_beyond
from nvium_core.engine.sampling_params import SamplingParams
from tests.engine.driving import columns
from tests.reference import invert, truncated


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


logit_rows = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5]) | st.floats(-8, 8, width=16), min_size=5, max_size=5)

wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.9]),
        "top_k": st.integers(0, 7),
        "top_p": st.sampled_from([0.05, 0.35, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    }
)
rows = st.tuples(logit_rows, wishes, st.floats(0, 1, exclude_max=True))


def drawn(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> list[int]:
    draws = [each.draw() for each in params]
    return draw(logits, columns(draws), uniform, is_ranked=any(each.is_ranked for each in draws)).tolist()


def is_between_two(weights: list[float], uniform: float) -> bool:
    """Whether rounding decides between two tokens, like 1/3 with three equal tokens."""
    total = sum(weights)
    return any(mass > 0 and abs(mass / total - uniform) < 1e-12 for mass in accumulate(weights))


@given(st.lists(rows, min_size=1, max_size=6))
def test_samples_equal_the_reference_row_by_row(rows):
    logits, asked, uniform = zip(*rows, strict=True)
    params = [SamplingParams(**wishes) for wishes in asked]
    weights = [*map(truncated, logits, params)]
    assume(not any(map(is_between_two, weights, uniform)))
    assert drawn(float64(logits), params, float64(uniform)) == [*map(invert, weights, uniform)]


@given(st.lists(logit_rows, min_size=1, max_size=4), st.floats(0, 1, exclude_max=True), wishes)
def test_temperature_0_selects_the_most_probable_token(logits, uniform, wishes):
    params = SamplingParams(**{**wishes, "temperature": 0, "min_p": 0.0}, sampling="mixture")
    tokens = drawn(float64(logits), [params] * len(logits), float64([uniform] * len(logits)))
    assert tokens == [row.index(max(row)) for row in logits]


@pytest.mark.parametrize("sampling", ["exits", "mixture", "original"])
def test_a_temperature_that_float32_rounds_to_0_selects_the_most_probable_token(sampling):
    params = SamplingParams(temperature=1e-46, sampling=sampling)
    assert drawn(torch.tensor([[0.0, 2.0, 1.0]]), [params], float64([0.9])) == [1]


def test_the_most_probable_token_survives_any_top_p():
    params = SamplingParams(temperature=2.0, top_k=1, top_p=5e-324)
    assert drawn(torch.tensor([[0.0, 3.0, 1.0]]), [params], float64([0.9])) == [1]


def test_an_impossible_token_is_never_sampled_and_hides_no_other():
    logits = float64([[-torch.inf, 0.0, -torch.inf, 0.0]])
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.9, min_p=0.1, temperature=0.5)):
        tokens = [drawn(logits, [params], float64([u]))[0] for u in (0.0, 0.49, 0.51, 1 - 2.0**-53)]
        assert tokens == [1, 1, 3, 3]


def test_a_row_of_impossible_tokens_samples_no_token():
    logits = float64([[-torch.inf, -torch.inf], [0.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0, sampling="mixture")):
        assert drawn(logits, [params, params], float64([0.3, 0.9])) == [NO_TOKEN, 1]


sparse_weights = st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0]), min_size=1, max_size=40)


@given(sparse_weights, st.integers(0, 700), st.floats(0, 1.1))
def test_the_index_is_the_first_beyond_the_target_with_a_weight(few, before, share):
    weights = [*few, *[0.0] * before, 0.5, *few, *[0.0] * before]
    target = share * sum(weights)
    sums = list(accumulate(weights))
    expected = next((x for x, total in enumerate(sums) if total > target), sums.index(sums[-1]))
    assert first_beyond(float64([weights]), float64([[target]])).tolist() == [[expected]]


@pytest.mark.parametrize("asked", [{"top_k": 300}, {"top_p": 0.6}, {"top_k": 40, "top_p": 0.9}, {}])
def test_samples_of_a_large_vocabulary_equal_the_reference(asked):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 700, generator=generator, dtype=torch.float64).round(decimals=1) * 2
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    params = [SamplingParams(**asked)] * 6
    tokens, kept = drawn(logits, params, uniform), map(truncated, logits.tolist(), params)
    assert tokens == [invert(weights, u) for weights, u in zip(kept, uniform.tolist(), strict=True)]


def test_the_argmax_is_certain_only_if_the_remaining_mass_cannot_change_it_and_ties_go_to_the_lowest_id():
    token, certain = certified_argmax(float64([[0.5, 0.2, 0.1]] * 2), float64([0.2, 0.3]))
    assert token.tolist() == [0, 0]
    assert certain.tolist() == [True, False]
    token, _ = certified_argmax(float64([[0.1, 0.4, 0.4]]), float64([0.0]))
    assert token.tolist() == [1]
