"""Figures of spoken texts against slow, obvious counts; exits that do not speak as often as they say are noticed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import Engine, SamplingParams
from nvium_core.evaluation.text_quality import (
    Text,
    distinct_words,
    exit_frequencies,
    judge,
    quality,
    repeated_grams,
)
from nvium_core.model import reference
from tests.byte_model import load_byte_model
from tests.random_models import random_model

PROMPT = [1, 2, 3]
EXIT_LAYERS = [1, 2, 4]


def spoken(num_texts: int) -> list[Text]:
    engine = Engine(random_model(EXIT_LAYERS, seed=2))
    params = [SamplingParams(max_tokens=40, seed=seed, ignore_eos=True) for seed in range(num_texts)]
    completions = [engine.generate([PROMPT], each)[0] for each in params]
    return [Text(PROMPT, said.token_ids, said.exits) for said in completions]


@pytest.mark.parametrize("sampling", ["exits", "mixture"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probabilities_and_entropies_are_those_of_the_served_distribution(
    sampling: str, temperature: float
) -> None:
    model, text = random_model(EXIT_LAYERS, seed=2), Text(PROMPT, [4, 5, 6], [])
    params = SamplingParams(sampling=sampling, temperature=temperature)  # type: ignore[arg-type]
    found = judge(model, text, params)
    for place, token in enumerate(text.token_ids):
        exits = reference.last_exits(model, PROMPT + text.token_ids[:place])
        mixture_V, served_V = [0.0] * 17, [0.0] * 17
        reached = 1.0
        for w, logits in exits:
            tempered = reference.softmax([logit / temperature for logit in logits])
            mixture_V = [m + reached * w * p for m, p in zip(mixture_V, reference.softmax(logits), strict=True)]
            served_V = [s + reached * w * p for s, p in zip(served_V, tempered, strict=True)]
            reached *= 1 - w
        if sampling == "mixture":
            served_V = reference.softmax([math.log(m) / temperature for m in mixture_V])
        assert float(found.logprobs[place]) == pytest.approx(math.log(mixture_V[token]))
        assert float(found.entropies[place]) == pytest.approx(-sum(p * math.log(p) for p in served_V))


def test_the_engine_leaves_as_often_as_the_routers_say() -> None:
    texts = spoken(12)
    judgements = [judge(random_model(EXIT_LAYERS, seed=2), text, SamplingParams()) for text in texts]
    figures = exit_frequencies(EXIT_LAYERS, texts, judgements)
    assert figures.deviation < 4
    assert figures.exit_shares == pytest.approx(figures.expected_exit_shares, abs=0.1)
    all_exits = [exit_ for text in texts for exit_ in text.exits]
    assert figures.mean_depth == pytest.approx(sum(EXIT_LAYERS[k - 1] / 4 for k in all_exits) / len(all_exits))


def test_exits_taken_more_often_than_they_say_stand_out() -> None:
    texts = [Text(text.prompt, text.token_ids, [3] * len(text.exits)) for text in spoken(6)]
    judgements = [judge(random_model(EXIT_LAYERS, seed=2), text, SamplingParams()) for text in texts]
    assert exit_frequencies(EXIT_LAYERS, texts, judgements).deviation > 4


@given(st.lists(st.sampled_from("ab"), max_size=30))
def test_repeated_runs_of_words_are_those_seen_before(words: list[str]) -> None:
    seen, repeated = set[tuple[str, ...]](), 0
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    for gram in grams:
        repeated += gram in seen
        seen.add(gram)
    assert repeated_grams(words) == pytest.approx(repeated / max(1, len(grams)))


def test_distinct_words_are_counted_once() -> None:
    assert distinct_words(["a", "fox", "a", "hen"]) == 0.75
    assert distinct_words([]) == 0


def test_texts_count_alike_and_their_spread_is_told() -> None:
    tokenizer = load_byte_model().tokenizer
    texts = [Text([0], tokenizer.encode(words), []) for words in ("a fox a fox a fox", "one two")]
    judgements = [judge(random_model(EXIT_LAYERS, vocab_size=257), text, SamplingParams()) for text in texts]
    figures = quality(tokenizer, texts, judgements)
    means = torch.tensor([float(each.logprobs.mean()) for each in judgements])
    assert figures.mean_logprob == pytest.approx(float(means.mean()))
    assert figures.mean_logprob_error == pytest.approx(float(means.std()) / math.sqrt(2))
    assert figures.distinct_words == pytest.approx((2 / 6 + 1) / 2)
    assert figures.repeated_grams == pytest.approx((1 / 3 + 0) / 2)
    assert quality(tokenizer, texts[:1], judgements[:1]).mean_logprob_error is None
