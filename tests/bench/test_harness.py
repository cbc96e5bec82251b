"""Turns, ratios and timed runs."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import EngineError, InvalidRequest, SamplingParams
from nvium_core.bench.harness import (
    interleaved,
    load_subjects,
    median_ratio,
    num_differing,
    subject_of,
    timed,
)
from tests.bench.tiny import tiny_subject
from tests.byte_model import load_byte_model, token_ids

lists = st.lists(st.integers(0, 3), max_size=6)


def test_contenders_take_turns_in_both_orders_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str, number: int) -> int:
        order.append(name)
        return number

    results = interleaved({n: lambda number, n=n: contender(n, number) for n in "ab"}, repeats=3, label="")
    assert "".join(order) == "abbaabba"
    assert results == {"a": [1, 2, 3], "b": [1, 2, 3]}


def test_a_contender_that_is_too_slow_takes_fewer_turns_but_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def contender(number: int, taken: float) -> int:
        nonlocal now
        now += taken
        return number

    monkeypatch.setattr("time.perf_counter", lambda: now)
    taken = {"quick": 1.0, "slow": 4.0, "hopeless": 50.0}
    contenders = {name: partial(contender, taken=each) for name, each in taken.items()}
    results = interleaved(contenders, repeats=5, label="", seconds=48)
    assert results == {"quick": [1, 2, 3, 4, 5], "slow": [1, 2, 3], "hopeless": [1]}


def test_a_ratio_is_of_the_turns_that_both_took() -> None:
    assert median_ratio([4.0, 6.0, 8.0], [2.0]) == 2.0


def test_a_ratio_is_taken_within_each_turn() -> None:
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


@given(st.lists(st.tuples(lists, lists), max_size=4))
def test_differing_places_are_those_where_one_would_have_to_be_changed(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    slow = sum(
        one[place : place + 1] != other[place : place + 1]
        for one, other in pairs
        for place in range(max(len(one), len(other)))
    )
    assert num_differing([one for one, _ in pairs], [other for _, other in pairs]) == slow


def test_a_timed_run_speaks_what_the_engine_speaks() -> None:
    subject = tiny_subject()
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True, n=2)
    timing = timed(subject.engine(), [(subject.prompt, params), ([7, 8], params)])
    expected = subject.engine().generate([subject.prompt, [7, 8]], params)
    assert timing.completions == expected
    assert timing.num_tokens == 4 * 9
    assert all(0 < first <= timing.seconds for first in timing.first_token_seconds)
    assert len(timing.first_token_seconds) == 4


def test_a_run_that_fails_is_no_measurement() -> None:
    subject = tiny_subject()
    subject.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        timed(subject.engine(), [(subject.prompt, SamplingParams(max_tokens=2))])


def test_random_prompts_are_alike_only_if_their_seeds_are() -> None:
    subject = tiny_subject()
    assert subject.random_tokens(20, 1) == subject.random_tokens(20, 1) != subject.random_tokens(20, 2)


def test_a_model_with_a_tokenizer_is_given_words() -> None:
    assert subject_of(load_byte_model()).prompt == token_ids("Once upon a time there was a")


def test_a_shape_has_as_many_exits_as_the_routing_and_the_precision_asked_for() -> None:
    [subject] = load_subjects(None, "4x128", ".5,.25,.25", "cpu", "bfloat16")
    assert subject.model.config.num_exits == 3
    assert subject.as_dict() == {**subject.as_dict(), "model": "random-4x128", "device": "cpu", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "shape", "routing", "field"),
    [
        ("some-model", "4x128", None, "shape"),
        (None, None, ".5,.5", "routing"),
        (None, "4x128", ".5,x", "routing"),
        (None, "4x128", "-.5,1.5", "routing"),
        (None, "4x127", None, "shape"),
    ],
)
def test_a_subject_that_cannot_be_is_refused_by_name(
    model: str | None, shape: str | None, routing: str | None, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        next(load_subjects(model, shape, routing, "cpu", "float32"))
