import math

import numpy as np
import pytest
import torch

from nvium_core import Engine, EngineConfig, FailureEvent, InvalidRequest, SamplingParams, TokenEvent
from nvium_core.engine.sampling_params import RANGES
from tests.engine.automaton import Automaton, Rule
from tests.engine.driving import events_of
from tests.random_models import random_model

MODEL = random_model([1, 3], context=32)


@pytest.mark.parametrize(
    ("token_ids", "settings", "field"),
    [
        ([], {}, "prompt"),
        ([17], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids"),
        ([1], {"logit_bias": {17: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"max_tokens": 0, "logprobs": 0, "prompt_logprobs": True}, "max_tokens"),
        ([1] * 32, {"max_tokens": 1}, "prompt"),
        ([1], {"max_tokens": 3, "min_tokens": 2, "stop_token_ids": tuple(range(17))}, "min_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field(token_ids, settings, field):
    engine = Engine(MODEL)
    with pytest.raises(InvalidRequest) as refusal:
        engine.add("x", token_ids, SamplingParams(**settings))
    assert refusal.value.field == field
    assert not engine.has_work


INVALID: dict[str, list[object]] = {
    "max_tokens": [0, 4.5, "4"],
    "min_tokens": [-1, 17, True],
    "temperature": [math.nan, None],
    "top_k": [-1, 2**31, 1.5],
    "top_p": [0, 1.1, math.nan, "most"],
    "min_p": [math.nan],
    "presence_penalty": [math.nan],
    "frequency_penalty": [math.nan],
    "repetition_penalty": [0, 1e-320, 2.1, math.nan],
    "logit_bias": [{1: 100.1}, {1: 0.0, 2: -100.1}, {1: math.nan}, dict.fromkeys(range(1025), 1.0), [1], {1: "a"}],
    "stop_token_ids": [5],
    "seed": [2**63, -(2**63) - 1, 1.5],
    "choice": [-1, 2**31],
    "n": [0, 1.5, 2000],
    "best_of": [0, "all"],
    "sampling": ["beam"],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [True],
}


WRONG: list[dict[str, object]] = [{field: value} for field, values in INVALID.items() for value in values]
WRONG += [{"min_tokens": 1, "constraint": Automaton(Rule(1, 17))}]
WRONG += [{"max_tokens": -1, "logprobs": 0, "prompt_logprobs": True}, {"best_of": 1, "n": 2}]


@pytest.mark.parametrize("settings", WRONG, ids=lambda settings: str(settings)[:40])
def test_invalid_sampling_parameters_are_refused_by_name(settings):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**settings)
    assert refusal.value.field == next(iter(settings))


@pytest.mark.parametrize(("field", "lowest", "highest"), RANGES)
def test_a_range_holds_its_bounds_and_nothing_beyond(field, lowest, highest):
    for value in (lowest, highest):
        SamplingParams(**{field: value})
    for value in (math.nextafter(lowest, -math.inf), math.nextafter(highest, math.inf), math.inf, -math.inf):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be between {lowest} and {highest}"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 16},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300},
        {"logit_bias": {1: np.float32(100), 2: -100.0}},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"choice": 2**31 - 1},
        {"best_of": 2, "n": 2},
    ],
    ids=str,
)
def test_the_last_value_that_is_allowed_is_served(settings):
    params = SamplingParams(**settings)
    completions = Engine(MODEL).generate([[1, 2]], params)
    assert len(completions) == params.n
    assert all(completion.finish_reason for completion in completions)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "random"},
        {"max_sequences": 0},
        {"max_rows_per_step": 0},
        {"chunk_rows": 0},
        {"max_wait_steps": 0},
        {"page_size": 0},
        {"cache_tokens": 0},
        {"cache_memory": "1GiB", "cache_tokens": 512},
        *({"threads": number} for number in ("0", "-1", "two", "")),
        {"context": 33},
        {"context": 0},
        {"context": 1},
        {"cache_memory": "1TB"},
        {"cache_memory": ""},
        {"cache_tokens": 10**15},
        {"max_sequences": 10**9},
        {"cache_dtype": "int8"},
        *({"cache_dtype": name} for name in ("float32", "float16", "bfloat16")),  # the model has float64
    ],
    ids=str,
)
def test_an_engine_out_of_range_or_with_impossible_limits_is_refused_by_name(settings):
    with pytest.raises(InvalidRequest) as refusal:
        Engine(MODEL, EngineConfig(**settings))
    assert refusal.value.field == next(iter(settings))


def test_a_request_larger_than_the_whole_cache_is_refused_at_once_and_smaller_ones_are_served():
    engine = Engine(MODEL, EngineConfig(page_size=4, cache_tokens=16))
    with pytest.raises(InvalidRequest, match=r"^max_tokens: .* context length is 16 .* requested 17 "):
        engine.add("x", [1] * 10, SamplingParams(max_tokens=7))
    with pytest.raises(InvalidRequest, match=r"^prompt: .* requested 18 tokens"):
        engine.add("x", [1] * 17, SamplingParams(max_tokens=1))
    assert not engine.has_work
    (completion,) = engine.generate([[1] * 10], SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(completion.token_ids) == 6


def test_an_overlong_request_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequest, match=r"32 tokens. However, you requested 33 tokens: 20 in") as refusal:
        Engine(MODEL).add("x", [1] * 20, SamplingParams(max_tokens=13))
    assert refusal.value.field == "max_tokens"


def test_cancelling_frees_everything_at_once_and_unknown_ids_are_ignored():
    engine = Engine(MODEL, EngineConfig(max_sequences=1))
    engine.add("running", [1, 2, 3])
    engine.add("waiting", [1, 2, 3])
    engine.step()
    for request_id in ("running", "waiting", "waiting", "nobody"):
        engine.cancel(request_id)
    engine.check_integrity()
    assert not engine.has_work
    assert engine.admission.pool.usage == 0
    assert engine.step() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_that_is_not_finite_fails_the_sequence_and_no_other(temperature):
    model = random_model([2], context=32)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    engine = Engine(model)
    engine.add("sick", [5], SamplingParams(temperature=temperature))
    engine.add("sick and constrained", [5], SamplingParams(constraint=Automaton(Rule(seed=1, vocab_size=17))))
    engine.add("well", [1], SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True, top_k=1, seed=1))
    events = list(events_of(engine))
    failures = {event.request_id: str(event.error) for event in events if isinstance(event, FailureEvent)}
    assert failures.keys() == {"sick", "sick and constrained"}
    assert all("not finite" in message for message in failures.values()), "the constraint is not blamed"
    assert 1 <= sum(event.request_id == "well" and isinstance(event, TokenEvent) for event in events) <= 3


def test_a_duplicate_id_is_refused_and_reports_have_the_rows_of_each_block():
    engine = Engine(MODEL)
    engine.add("x", [1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add("x", [1])
    engine.step()
    assert engine.reports[0][:3] == (1, 1, 3)
