"""The vectorised sampler against the reference's plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.sampling import NO_TOKEN, Truncation, certified_argmax, draw, inverse_cdf
from nvium_core.model.reference import invert, truncated


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


logit_rows = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5]) | st.floats(-8, 8, width=32), min_size=5, max_size=5)


@given(
    st.lists(
        st.tuples(
            logit_rows,
            st.sampled_from([0.3, 1.0, 1.9]),
            st.integers(0, 7),
            st.sampled_from([0.05, 0.35, 0.9, 1.0]),
            st.floats(0, 1, exclude_max=True),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_draws_equal_the_reference_row_by_row(rows: list[tuple[list[float], float, int, float, float]]) -> None:
    logits, temperature, top_k, top_p, uniform = zip(*rows, strict=True)
    truncation = Truncation(float64(temperature), torch.tensor(top_k), float64(top_p))
    tokens = draw(float64(logits), truncation, float64(uniform)).tolist()
    assert tokens == [invert(truncated(row, t, k, p), u) for row, t, k, p, u in rows]


def test_equal_logits_are_truncated_to_the_lowest_ids() -> None:
    truncation = Truncation(float64([1.0]), torch.tensor([2]), float64([1.0]))
    for uniform, token in ((0.0, 0), (0.49, 0), (0.51, 1), (0.999999, 1)):
        assert draw(torch.zeros(1, 6), truncation, float64([uniform])).tolist() == [token]


def test_the_most_probable_token_survives_any_top_p() -> None:
    truncation = Truncation(float64([2.0]), torch.tensor([1]), float64([5e-324]))
    assert draw(torch.tensor([[0.0, 3.0, 1.0]]), truncation, float64([0.9])).tolist() == [1]


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
