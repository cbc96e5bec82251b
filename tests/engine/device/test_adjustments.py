"""Penalties, biases and too early ends against the reference's plain Python."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import Engine, SamplingParams
from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.reference import Params, State, adjusted
from tests.random_models import random_model

VOCAB_SIZE = 6
tokens = st.integers(0, VOCAB_SIZE - 1)
logits = st.sampled_from([-math.inf, -1.0, 0.0, 0.5]) | st.floats(-30, 30)
wishes = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6]),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 4),
    }
)
rows = st.tuples(
    st.lists(tokens, min_size=1, max_size=5),
    st.lists(tokens, max_size=5),
    st.frozensets(tokens, max_size=2),
    wishes,
    st.lists(logits, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
)
Row = tuple[list[int], list[int], frozenset[int], dict[str, Any], list[float]]


def sequence(prompt: list[int], generated: list[int], stops: frozenset[int], asked: dict[str, Any]) -> Sequence:
    params = SamplingParams(**asked)
    made = Sequence("x", prompt, params, seed=0, num_blocks=2, arrival=0, stop_token_ids=stops)
    for token in generated:
        made.append(token)
    return made


@given(st.lists(rows, min_size=1, max_size=5))
def test_logits_are_adjusted_as_the_reference_does_row_by_row(rows: list[Row]) -> None:
    logits_RV = torch.tensor([logits for *_, logits in rows], dtype=torch.float64)
    adjust(logits_RV, [sequence(*row[:4]) for row in rows])
    for (prompt, generated, stops, asked, logits), row in zip(rows, logits_RV.tolist(), strict=True):
        assert row == adjusted(logits, State(prompt, generated, [], Params(**asked, stop_token_ids=stops)))


@given(rows, rows)
def test_several_exits_of_a_sequence_are_adjusted_alike(first: Row, second: Row) -> None:
    sequences = [sequence(*first[:4]), sequence(*second[:4])]
    logits_JRV = torch.tensor([[first[4], second[4]], [second[4], first[4]]], dtype=torch.float64)
    alone_JRV = logits_JRV.clone()
    adjust(logits_JRV, sequences)
    for exit_logits_RV in alone_JRV:
        adjust(exit_logits_RV, sequences)
    assert torch.equal(logits_JRV, alone_JRV)


@given(rows)
def test_an_impossible_token_remains_impossible_and_nothing_becomes_nan(row: Row) -> None:
    logits_RV = torch.tensor([row[4]], dtype=torch.float64)
    was_impossible = logits_RV == -torch.inf
    adjust(logits_RV, [sequence(*row[:4])])
    assert not logits_RV.isnan().any()
    assert (logits_RV[was_impossible] == -torch.inf).all()


def test_presence_is_taken_once_and_frequency_per_occurrence_and_neither_for_the_prompt() -> None:
    logits_RV = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
    adjust(logits_RV, [sequence([1, 2], [2, 3, 3], frozenset(), {"presence_penalty": 1, "frequency_penalty": 0.25})])
    assert logits_RV.tolist() == [[0, 0, -1.25, -1.5, 0, 0]]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer_once() -> None:
    logits_RV = torch.tensor([[3.0, 3.0, -3.0, -3.0, 3.0, 0.0]], dtype=torch.float64)
    adjust(logits_RV, [sequence([0, 2], [4, 4], frozenset(), {"repetition_penalty": 2})])
    assert logits_RV.tolist() == [[1.5, 3, -6, -3, 1.5, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["exits", "mixture"])
def test_an_end_may_come_with_the_token_after_min_tokens_and_no_sooner(temperature: float, sampling: Any) -> None:
    engine = Engine(random_model([1, 2, 4]))
    for stop in (0, 5):
        params = SamplingParams(
            max_tokens=6,
            min_tokens=3,
            stop_token_ids=(5,),
            logit_bias={stop: 100},
            temperature=temperature,
            sampling=sampling,
            seed=1,
        )
        (completion,) = engine.generate([[1, 2]], params)
        assert (len(completion.token_ids), completion.token_ids[-1], completion.finish_reason) == (4, stop, "stop")
        assert not {0, 5} & {*completion.token_ids[:-1]}


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_forbids_it() -> None:
    engine = Engine(random_model([1, 2, 4]))
    for sampling in ("exits", "mixture"):
        forced = SamplingParams(max_tokens=5, logit_bias={9: 100}, sampling=sampling, seed=1)
        allowed = {token: -100 for token in range(17) if token not in (3, 4)}
        forbidden = SamplingParams(max_tokens=20, logit_bias=allowed, sampling=sampling, seed=1)
        assert engine.generate([[1]], forced)[0].token_ids == [9] * 5
        assert {*engine.generate([[1]], forbidden)[0].token_ids} == {3, 4}
