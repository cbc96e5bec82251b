"""log π_mix by position: the parts are those of the context, and together they are the whole."""

import math

import pytest

from nvium_core.evaluation import perplexity
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.evaluation.predictions import window_predictions
from nvium_core.evaluation.report import by_position
from tests.byte_model import load_byte_model
from tests.random_models import random_model

DOCUMENTS = ["A fox.", "Two hens went to see a third, who was not in. " * 4]


def test_the_parts_of_the_context_add_up_to_the_perplexity_of_the_text() -> None:
    loaded = load_byte_model(context=32)
    found = evaluate(loaded.model, loaded.tokenizer, DOCUMENTS)
    assert [(part["first"], part["last"]) for part in found.by_position] == [(0, 7), (8, 15), (16, 23), (24, 31)]
    assert sum(part["num_tokens"] for part in found.by_position) == found.num_tokens
    nats = -sum(part["num_tokens"] * part["mean_logprob"] for part in found.by_position)
    assert nats / found.num_tokens == pytest.approx(math.log(found.perplexity))


def test_a_token_counts_where_the_one_before_it_stands_in_the_window() -> None:
    model, ids = random_model([1, 2, 4]), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    whole = [-nll for nll in window_predictions(model, ids, 1).mix_nll.tolist()]
    first, second = perplexity.by_position(window_predictions(model, ids, first_target=3), context=16)
    assert (first["num_tokens"], first["mean_logprob"]) == (2, pytest.approx(sum(whole[2:4]) / 2))
    assert (second["num_tokens"], second["mean_logprob"]) == (4, pytest.approx(sum(whole[4:8]) / 4))


def test_the_twin_stands_beside_ours_where_its_parts_are_the_same() -> None:
    ours = [{"first": 0, "last": 255, "num_tokens": 1234, "mean_logprob": -2.5}]
    assert by_position({"by_position": ours}).endswith("| 0–255 | 1,234 | -2.5 |")
    dense = [{"first": 0, "last": 255, "num_tokens": 1234, "mean_logprob": -2.75}]
    assert by_position({"by_position": ours, "twin": {"by_position": dense}}).endswith("| -2.5 | -2.75 | 0.25 |")
    longer = [{"first": 0, "last": 511, "num_tokens": 2000, "mean_logprob": -2.75}]
    assert by_position({"by_position": ours, "twin": {"by_position": longer}}).endswith("| -2.5 | – | – |")
