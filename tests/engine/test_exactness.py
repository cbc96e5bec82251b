"""A request's tokens and exits equal Algorithm 1's, whatever else runs and however it is scheduled."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nvium_core import Engine, EngineConfig, NviumForCausalLM, PromptEvent, SamplingParams, TokenEvent
from nvium_core.choices import Schedule
from nvium_core.model.stored import quantize_model
from tests import reference
from tests.engine.automaton import Automaton, Rule
from tests.random_models import random_model

CONTEXT = 24
VOCAB_SIZE = 13
STOP = 7


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    arrives: int
    is_cancelled: int | None


GEMMA = {"layer_norms": "both", "hidden_act": "gelu_pytorch_tanh", "embedding_scale": 2.8, "attention_scale": 0.4}
GEMMA |= {"qk_norm": True, "attention_cap": 2.0, "logit_cap": 3.0}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
MAKES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True},
    {"qk_norm": True, "no_rope_layers": [0]},
    {"layer_norms": "both"},
    {"layer_norms": "both", "norms_loops": True},
    {"windows": 5},
    {"windows": 5, "window_rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    GEMMA,
    {"layer_norms": "after", "qk_norm": True, "qk_norm_kind": "width", "residual_scale": 0.5, "logit_scale": 0.3},
    {"qk_norm": True, "qk_norm_kind": "rotated head", "mlp_gated": False, "hidden_act": "relu2"} | HALF_ROTARY,
]


@st.composite
def models(draw: st.DrawFn) -> NviumForCausalLM:
    depths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    exit_layers = [sum(depths[: k + 1]) for k in range(len(depths))]
    seed, make = draw(st.integers(0, 50)), draw(st.sampled_from(MAKES))
    if make.get("norms_loops") or draw(st.integers(0, 3)) == 0:  # blocks that share their weights
        exit_layers = [depths[0] * (k + 1) for k in range(len(depths))]
        make = {**make, "num_loops": len(depths)}
    shape = {"vocab_size": VOCAB_SIZE, "width": 8, "num_heads": 2, "num_key_heads": 1, "context": CONTEXT}
    return random_model(exit_layers, seed=seed, **shape, **fields_of(make, exit_layers[-1]))


def fields_of(make: dict[str, Any], num_calls: int) -> dict[str, Any]:
    """Give every second layer the window of a make."""
    layers = range(num_calls // make.get("num_loops", 1))
    windows = [make["windows"] if layer % 2 else None for layer in layers] if "windows" in make else ()
    return make | {"windows": windows}


THRESHOLDS = 0.02, 0.3, 0.5, 0.9, 1.0, 7.0

exit_rules = st.one_of(
    st.fixed_dictionaries({"sampling": st.sampled_from(["exits", "exits", "mixture", "original", "original"])}),
    st.fixed_dictionaries({"sampling": st.just("threshold"), "threshold": st.sampled_from(THRESHOLDS)}),
    st.fixed_dictionaries({"sampling": st.just("confidence"), "threshold": st.sampled_from(THRESHOLDS)}),
)

distributions = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 1.0, 0.6, 1.7, 0.0]),
        "top_k": st.sampled_from([0, 0, 1, 4]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8, 0.3]),
        "min_p": st.sampled_from([0.0, 0.0, 0.07, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, 2.0, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, 2.0, -0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 2.0, 0.6]),
        "logit_bias": st.just({})
        | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -2.5, 1.3, 100.0]), max_size=4),
    }
)
"""Parameters of f."""

sizes = {"vocab_size": st.just(VOCAB_SIZE), "length": st.integers(1, 8), "num_bytes": st.integers(1, 4)}
rules = st.builds(Rule, seed=st.integers(0, 99), **sizes, share=st.sampled_from([0.1, 0.5, 1.0]))
"""Constraints, with masks shorter and longer than the vocabulary."""

SHARED_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
"""A common prefix of prompts, which then share pages."""


@st.composite
def requests(draw: st.DrawFn) -> Request:
    beginning = SHARED_PROMPT[: draw(st.just(0) | st.integers(0, len(SHARED_PROMPT)))]
    prompt = beginning + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20 - len(beginning)))
    rule = draw(exit_rules)
    logprobs = None if rule["sampling"] == "confidence" else draw(st.sampled_from([None, None, 0, 2]))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, min(8, CONTEXT - len(prompt)))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        choice=draw(st.integers(0, 3)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        logprobs=logprobs,
        prompt_logprobs=logprobs is not None and draw(st.booleans()),
        stop_token_ids=(STOP,) if draw(st.booleans()) else (),
        ignore_eos=draw(st.booleans()),
        early_exits=draw(st.sampled_from([True, True, True, False])),
        probabilities=logprobs is not None and draw(st.booleans()),
        **rule,
        **draw(distributions),
    )
    if automaton := draw(st.none() | st.none() | rules):
        params = replace(params, constraint=Automaton(automaton))
    else:
        params = replace(params, min_tokens=draw(st.just(0) | st.integers(0, params.max_tokens)))
    return Request(prompt, params, draw(st.integers(0, 12)), draw(st.none() | st.none() | st.integers(1, 20)))


configs = st.builds(
    EngineConfig,
    schedule=st.sampled_from(get_args(Schedule)),
    max_sequences=st.integers(1, 4),
    max_rows_per_step=st.integers(1, 24),
    chunk_rows=st.integers(1, 24),
    max_wait_steps=st.integers(1, 30),
    page_size=st.integers(1, 6),
    cache_tokens=st.integers(CONTEXT, 2 * CONTEXT),
    prefix_caching=st.sampled_from([True, True, False]),
    deterministic=st.sampled_from([False] * 7 + [True]),
    max_drafts=st.none() | st.integers(0, 6),
)


def expected(model: NviumForCausalLM, request: Request, choice: int) -> list[reference.Sampled]:
    """Return the tokens of Algorithm 1, their exits and p_k of these exits."""
    params, end_of_text = request.params, () if request.params.ignore_eos else (0,)
    asked = replace(params, stop_token_ids=(*params.stop_token_ids, *end_of_text))
    return reference.sample(model, request.prompt, partial(reference.uniform, params.seed, choice), asked)


Events = dict[tuple[int, int], list[TokenEvent]]
"""Events of each choice of each request."""


def served(engine: Engine, plan: list[Request]) -> Events:
    """Run the plan, adding and cancelling requests at the planned steps."""
    events_of: Events = {(i, r.params.choice + j): [] for i, r in enumerate(plan) for j in range(r.params.n)}
    now = 0
    while engine.has_work or now <= max(request.arrives for request in plan):
        for i, request in enumerate(plan):
            if request.arrives == now:
                engine.add(str(i), request.prompt, request.params)
            if request.is_cancelled is not None and request.arrives + request.is_cancelled == now:
                engine.cancel(str(i))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                events_of[int(event.request_id), event.choice].append(event)
            else:
                assert isinstance(event, PromptEvent)
        engine.check_integrity()
        now += 1
    assert engine.pool.num_free == engine.pool.num_pages
    return events_of


@torch.no_grad()
def explicit_logprobs(model: NviumForCausalLM, prompt: list[int], token_ids: list[int], exits: Any) -> list[float]:
    """Return log π_mix, or log π_k of these exits, of the tokens after the prompt, from one full forward pass."""
    out = model(torch.tensor([prompt + token_ids]), output_exit_logits=True)
    first = len(prompt) - 1
    if exits is None:
        return [float(out.logits[0, t, token]) for t, token in enumerate(token_ids, first)]
    log_TEV = out.exit_logits[0].log_softmax(-1)
    pairs = zip(exits, token_ids, strict=True)
    return [float(log_TEV[t, exit_ - 1, token]) for t, (exit_, token) in enumerate(pairs, first)]


@settings(max_examples=3 * settings().max_examples)
@given(models(), configs, st.lists(requests(), min_size=1, max_size=5))
def test_tokens_and_exits_equal_algorithm_1_whatever_the_schedule(model, config, plan):
    check(model, served(Engine(model, config), plan), plan)


def check(model: NviumForCausalLM, events_of: Events, plan: list[Request]) -> None:
    """Assert that all tokens, exits and scores equal Algorithm 1's."""
    for (number, choice), events in events_of.items():
        request = plan[number]
        full = expected(model, request, choice)
        if request.is_cancelled is None or (events and events[-1].finish_reason):
            assert len(events) == len(full)
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        sampled = full[: len(events)]
        assert [(event.token_id, event.exit) for event in events] == [(each.token_id, each.exit) for each in sampled]
        found_p = [event.exit_probability for event in events]
        assert found_p == pytest.approx([each.exit_probability for each in sampled], rel=1e-6, abs=1e-12)
        if request.params.logprobs is not None:
            scores = [event.score.logprob for event in events if event.score]
            token_ids = [event.token_id for event in events]
            sampling, last = request.params.sampling, model.config.num_exits
            exits = [event.exit if sampling == "threshold" else last for event in events]
            is_mixed = sampling not in ("original", "threshold")
            explicit = explicit_logprobs(model, request.prompt, token_ids, None if is_mixed else exits)
            assert scores == pytest.approx(explicit, abs=1e-10)


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_a_quantized_model_equals_the_model_with_its_dequantized_weights(kind):
    model = random_model([1, 2, 4], vocab_size=VOCAB_SIZE, width=32, context=CONTEXT)
    quantize_model(model, kind)
    wishes: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"sampling": "mixture"}, {"logprobs": 2}, {}]
    params = [SamplingParams(max_tokens=12, seed=seed, **wish) for seed, wish in enumerate(wishes)]
    plan = [Request([1, 2, 3 + n], each, arrives=n, is_cancelled=None) for n, each in enumerate(params)]
    check(model, served(Engine(model, EngineConfig(max_sequences=3)), plan), plan)


NUM_DRAWS = 200_000
PROMPT = [3, 1]


@cache
def joint_counts() -> torch.Tensor:
    """Count (exit, token) over requests that differ only in their seeds, [E, V]."""
    model = disagreeing_model()
    engine = Engine(model, EngineConfig(max_sequences=1000, max_rows_per_step=2000, cache_tokens=16_000))
    counts = torch.zeros(model.config.num_exits, VOCAB_SIZE, dtype=torch.float64)
    for seed in range(NUM_DRAWS):
        engine.add(str(seed), PROMPT, SamplingParams(max_tokens=1, seed=seed))
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            counts[event.exit - 1, event.token_id] += 1
    return counts


def disagreeing_model() -> NviumForCausalLM:
    return random_model([1, 2, 3, 4], seed=7, vocab_size=VOCAB_SIZE, width=8, num_heads=2, num_key_heads=1, context=8)


@torch.no_grad()
def explicit_joint() -> torch.Tensor:
    """Return p_k π_k(v) after the prompt, [E, V]."""
    out = disagreeing_model()(torch.tensor([PROMPT]), output_exit_logits=True)
    return out.exit_probs[0, -1, :, None] * out.exit_logits[0, -1].softmax(-1)


def p_value(counts_EV: torch.Tensor, joint_EV: torch.Tensor) -> float:
    """Return the chi-square p-value of the counts. Cells with fewer than 10 expected counts are merged."""
    expected_EV = joint_EV * counts_EV.sum()
    rare = expected_EV < 10
    observed = [*counts_EV[~rare].tolist(), float(counts_EV[rare].sum())]
    expected = [*expected_EV[~rare].tolist(), float(expected_EV[rare].sum())]
    if expected[-1] < 10:
        observed[0], expected[0] = observed[0] + observed.pop(), expected[0] + expected.pop()
    return float(chisquare(observed, expected, sum_check=False).pvalue)


def test_the_exits_of_the_chi_square_model_disagree():
    joint = explicit_joint()
    assert joint.sum(-1).min() > 0.04
    assert len(set(joint.argmax(-1).tolist())) > 1


@pytest.mark.slow
def test_200000_draws_follow_the_joint_distribution_of_exit_and_token():
    assert p_value(joint_counts(), explicit_joint()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("taken", "given_to"), [(0, 1), (1, 0), (2, 3), (3, 0)])
def test_moving_a_hundredth_of_probability_between_exits_is_detected(taken, given_to):
    joint = explicit_joint()
    shares = joint.sum(-1)
    shifted = joint.clone()
    shifted[taken] *= 1 - 0.01 / shares[taken]
    shifted[given_to] *= 1 + 0.01 / shares[given_to]
    assert p_value(joint_counts(), shifted) < 1e-6
