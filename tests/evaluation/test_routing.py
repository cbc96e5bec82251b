"""Routing figures against plain sums over tokens."""

import numpy as np
import pytest
import torch

from nvium_core.evaluation.perplexity import QUANTILES, routing
from nvium_core.evaluation.predictions import Predictions, joined, window_predictions
from nvium_core.model.exits import EXIT
from tests.random_models import random_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture(scope="module")
def seen() -> Predictions:
    return window_predictions(random_model([1, 2, 4], seed=5), TOKENS, 1)


def test_shares_posteriors_and_entropy_are_those_of_plain_sums(seen: Predictions) -> None:
    figures = routing(seen, [1, 2, 4])
    p_TE, pi_TE = seen.log_p.exp(), seen.exit_nll.neg().exp()
    posterior_TE = p_TE * pi_TE / (p_TE * pi_TE).sum(-1, keepdim=True)
    assert figures["exit_shares"] == pytest.approx(p_TE.mean(0).tolist())
    assert figures["exit_posteriors"] == pytest.approx(posterior_TE.mean(0).tolist())
    assert figures["routing_entropy"] == pytest.approx(float(-(p_TE * p_TE.log()).sum(-1).mean()))
    assert figures["mean_depth"] == pytest.approx(float((p_TE * torch.tensor([0.25, 0.5, 1])).sum(-1).mean()))


def test_the_spread_of_routers_is_that_of_their_probabilities(seen: Predictions) -> None:
    figures, w_TK = routing(seen, [1, 2, 4]), seen.log_w[:, :-1, EXIT].exp()
    assert figures["router_means"] == pytest.approx(w_TK.mean(0).tolist())
    assert figures["router_deviations"] == pytest.approx(w_TK.std(0, correction=0).tolist())
    for quantile, row in zip(QUANTILES, np.transpose(figures["router_quantiles"]), strict=True):
        below = (w_TK.numpy() <= row).mean(0)
        assert (below >= quantile).all() and (below <= quantile + 2 / len(w_TK)).all()


def test_windows_add_up_whatever_their_lengths(seen: Predictions) -> None:
    parts = [Predictions(*(value[rows] for value in vars(seen).values())) for rows in (slice(0, 4), slice(4, None))]
    some, whole = routing(joined(parts), [1, 2, 4]), routing(seen, [1, 2, 4])
    assert some == whole
