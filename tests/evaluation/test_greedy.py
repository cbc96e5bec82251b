"""Temperature 0 over a text: the engine's decisions, position by position, without the engine."""

import pytest
import torch

from nvium_core import Engine, LoadedModel, SamplingParams
from nvium_core.evaluation import greedy
from nvium_core.evaluation.greedy import decide, evaluate_greedy, first_certain
from tests.byte_model import EXIT_LAYERS, load_byte_model, token_ids
from tests.random_models import random_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model(context=16)


def test_tokens_and_exits_are_those_the_engine_decides() -> None:
    model = random_model([1, 2, 3, 4], seed=1)
    (completion,) = Engine(model).generate([[1, 2]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    token_T, exit_T, explicit_T = decide(model, [1, 2, *completion.token_ids[:-1]], 1)
    assert token_T.tolist() == explicit_T.tolist() == completion.token_ids
    assert [exit_ + 1 for exit_ in exit_T.tolist()] == completion.exits
    assert {*completion.exits} == {1, 2, 3, 4}


def test_every_token_of_every_document_is_decided_once_and_as_the_explicit_mixture_would(loaded: LoadedModel) -> None:
    documents = ["A fox.", "", "Two hens went to see a third, who was not in."]
    figures = evaluate_greedy(loaded.model, loaded.tokenizer, documents)
    assert figures.num_tokens == sum(len(token_ids(text)) + 1 for text in documents)
    assert figures.agreement == 1
    assert sum(figures.exit_counts) == figures.num_tokens
    assert figures.early_share == pytest.approx(sum(figures.exit_counts[:-1]) / figures.num_tokens)
    depths = [layer / EXIT_LAYERS[-1] for layer in EXIT_LAYERS]
    mean = sum(count * depth for count, depth in zip(figures.exit_counts, depths, strict=True)) / figures.num_tokens
    assert figures.mean_depth == pytest.approx(mean)


def test_a_certificate_that_is_too_easily_given_is_noticed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "certified_argmax", lambda mixture_TV, _: (mixture_TV.argmax(-1), torch.tensor(True)))
    figures = evaluate_greedy(loaded.model, loaded.tokenizer, ["Two hens went to see a third, who was not in."])
    assert figures.exit_counts == [figures.num_tokens, 0, 0]
    assert figures.agreement < 1


def test_a_position_is_decided_at_the_first_exit_where_the_rest_cannot_overturn_it() -> None:
    logits_V = torch.tensor([0.9, 0.1]).log()
    exit_prob_TE = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.1, 0.5], [0.8, 0.1, 0.1]], dtype=torch.float64)
    token_T, exit_T = first_certain(exit_prob_TE, logits_V.expand(3, 3, 2))
    assert token_T.tolist() == [0, 0, 0]
    assert exit_T.tolist() == [1, 2, 0]
