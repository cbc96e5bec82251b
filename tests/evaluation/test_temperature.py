"""Temperatures compared on a random model of bytes, and the advice read off figures made up for it."""

import math
from typing import Any

import pytest

from nvium_core import LoadedModel
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.temperature import advice, measure, openings, temperature_where
from nvium_core.evaluation.text_quality import Quality
from tests.byte_model import load_byte_model

DOCUMENTS = ["A fox met two hens, who were out for a walk. " * repeats for repeats in (1, 2, 3, 4, 5)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model()


def made_up(sampling: str, temperature: float, mean_logprob: float, distinct_words: float = 0.8) -> dict[str, Any]:
    figures = {"mean_logprob": mean_logprob, "repeated_grams": 0.02, "distinct_words": distinct_words}
    return {"sampling": sampling, "temperature": temperature, **figures}


MIXTURE = [made_up("mixture", 0.5, -1.0), made_up("mixture", 0.7, -2.0), made_up("mixture", 1, -3.0)]
PEOPLE = Quality(mean_logprob=-3, mean_logprob_error=0.1, entropy=3, repeated_grams=0.01, distinct_words=0.8)


def test_every_way_is_measured_on_the_same_openings(loaded: LoadedModel) -> None:
    figures = measure(loaded, openings(loaded, DOCUMENTS, num_texts=3, num_tokens=20), temperatures=(0.5, 1.0))
    assert (figures["num_texts"], figures["prompt_tokens"], figures["tokens_per_text"]) == (3, 32, 20)
    ways = [(row["sampling"], row["temperature"]) for row in figures["rows"]]
    assert ways == [("exits", 0.5), ("exits", 1.0), ("mixture", 0.5), ("mixture", 1.0)]
    colder, warmer = figures["rows"][:2]
    assert colder["entropy"] < warmer["entropy"]
    assert all(row["deviation"] < 5 for row in (colder, warmer))
    assert "deviation" not in figures["rows"][2]
    assert all(math.isfinite(value) for value in figures["people"].values())


def test_openings_are_spread_over_the_documents_that_are_long_enough(loaded: LoadedModel) -> None:
    texts = openings(loaded, DOCUMENTS, num_texts=2, num_tokens=50)
    assert [len(text.prompt) for text in texts] == [32, 32]
    assert [len(text.token_ids) for text in texts] == [50, 50]
    assert loaded.tokenizer.decode(texts[0].prompt + texts[0].token_ids).startswith("<|endoftext|>A fox met two")


def test_where_few_documents_are_long_enough_there_are_fewer_texts_and_none_is_an_error(loaded: LoadedModel) -> None:
    assert len(openings(loaded, [*DOCUMENTS, "x" * 300], num_texts=4, num_tokens=200)) == 1
    with pytest.raises(EvaluationError, match="no document of the text has 232 tokens"):
        openings(loaded, DOCUMENTS, num_texts=4, num_tokens=200)


@pytest.mark.parametrize(("context", "lengths"), [(64, (16, 48)), (128, (32, 96)), (300, (32, 256))])
def test_openings_and_what_follows_are_as_long_as_the_context_allows(context: int, lengths: tuple[int, int]) -> None:
    loaded = load_byte_model(context=context)
    originals = openings(loaded, ["A fox met two hens. " * 20])
    assert [(len(text.prompt), len(text.token_ids)) for text in originals] == [lengths]
    assert measure(loaded, originals, temperatures=(1.0,))["tokens_per_text"] == lengths[1]


def test_the_advice_is_where_words_vary_as_peoples_do() -> None:
    rows = [made_up("exits", 0.5, -1.5, 0.5), made_up("exits", 0.7, -2.5, 0.75), made_up("exits", 1, -3.0, 0.85)]
    text = advice(PEOPLE, rows + MIXTURE)
    assert "(80% of a text's are different) at a temperature of 0.85." in text
    assert "2.0% at 0.5, 2.0% at 0.7, 2.0% at 1 are repetitions; of people's, 1.0%." in text
    assert "at temperature 0.5 as mixture at 0.60, at 0.7 as mixture at 0.85." in text


@pytest.mark.parametrize(("mean_logprob", "found"), [(-2.0, "0.70"), (-0.5, "less than 0.5"), (-4.0, "more than 1")])
def test_equal_temperatures_are_between_those_measured_or_said_not_to_be(mean_logprob: float, found: str) -> None:
    assert temperature_where("mean_logprob", mean_logprob, MIXTURE) == found
