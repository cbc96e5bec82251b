"""What is said of a text by CALM*, token by token."""

import math

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core.evaluation.calm import evaluate_calm
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.training.baselines.calm import CalmForCausalLM
from nvium_core.training.baselines.confidence import leave_when_confident
from nvium_core.training.baselines.decoding import Decoding
from tests.byte_model import END_OF_TEXT, byte_tokenizer, token_ids
from tests.training.baselines.small_models import small_calm

DOCUMENTS = ["A fox.", "", "Two hens went to see a third, who was not in; and so they went home again together."]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)


@pytest.fixture(scope="module")
def model() -> CalmForCausalLM:
    return small_calm(vocab_size=257)


def test_every_token_is_predicted_once_where_its_row_left(
    model: CalmForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = DOCUMENTS[0]
    figures = evaluate_calm(model, tokenizer, [text], threshold=0.2)
    decoding, nll, exits = Decoding(model, [0], 8), 0.0, []
    with torch.no_grad():
        for target in [*token_ids(text), 0]:
            logits_V, exit_layer = leave_when_confident(decoding, 0.2)
            nll -= float(logits_V.log_softmax(-1)[target])
            exits.append(exit_layer)
            decoding.token_ids.append(target)
    assert figures.num_tokens == 7
    assert figures.perplexity == pytest.approx(math.exp(nll / 7))
    assert figures.bits_per_character == pytest.approx(nll / 6 / math.log(2))
    assert figures.exit_shares == pytest.approx([exits.count(depth) / 7 for depth in (2, 4, 6)])
    assert figures.mean_depth == pytest.approx(sum(exits) / 7 / 6)
    assert 0 < figures.exit_shares[-1] < 1


def test_where_nobody_leaves_early_it_is_the_last_exits_perplexity(
    model: CalmForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    ours, plain = evaluate_calm(model, tokenizer, DOCUMENTS, 1.0), evaluate(model, tokenizer, DOCUMENTS)
    assert ours.num_tokens == plain.num_tokens == sum(len(token_ids(text)) + 1 for text in DOCUMENTS)
    assert ours.perplexity == pytest.approx(plain.perplexity) == pytest.approx(plain.exit_perplexities[-1])
    assert ours.exit_shares == [0, 0, 1] and ours.mean_depth == 1


def test_where_everybody_leaves_at_once_it_is_the_first_exits_perplexity(
    model: CalmForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    ours, plain = evaluate_calm(model, tokenizer, DOCUMENTS, 0.0), evaluate(model, tokenizer, DOCUMENTS)
    assert ours.perplexity == pytest.approx(plain.exit_perplexities[0])
    assert ours.exit_shares == [1, 0, 0]
