import math

import pytest
import torch
from transformers import get_wsd_schedule

from nvium_core import NviumForCausalLM
from nvium_core.training.optimizer import (
    LONG_RUN,
    BetaControl,
    LearningRate,
    OptimizerSettings,
    RouterWarmup,
    optimizers,
    parameter_groups,
    split_parameters,
)
from tests.random_models import small_config


def small_model() -> NviumForCausalLM:
    return NviumForCausalLM(small_config([1, 2], attention_bias=True))


def names_of(model: NviumForCausalLM) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def test_norms_biases_and_embeddings_are_not_decayed():
    names = names_of(model := small_model())
    decayed, undecayed = parameter_groups(model, list(model.parameters()), weight_decay=0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    for parameter in decayed["params"]:
        assert parameter.dim() == 2 and not any(word in names[id(parameter)] for word in ("norm", "bias", "embed"))
    for parameter in undecayed["params"]:
        assert any(word in names[id(parameter)] for word in ("norm", "bias", "embed"))
    assert sorted(names) == sorted(id(p) for p in [*decayed["params"], *undecayed["params"]])


def test_muon_trains_the_matrices_between_the_embedding_and_the_head():
    names = names_of(model := small_model())
    matrices, rest = ([names[id(p)] for p in part] for part in split_parameters(model))
    assert all(name.endswith("weight") and "norm" not in name for name in matrices)
    assert {"lm_head.weight", "model.embed_tokens.weight", "exits.0.router.head.weight"} <= set(rest)
    trained = {"exits.0.router.fc1.weight", "exits.1.adapter.up.weight", "model.layers.0.mlp.up_proj.weight"}
    assert trained <= set(matrices)
    assert sorted(matrices + rest) == sorted(names.values())


def test_every_parameter_is_in_one_group_with_its_maximum_rate():
    model = small_model()
    created = optimizers(model, 0.004, OptimizerSettings(muon_rate=0.02))
    groups = [group for optimizer in created for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == [0.02, 0.004, 0.004]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(id(p) for p in model.parameters())
    assert len(optimizers(model, 0.004, OptimizerSettings())) == 1


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (0.9, 0.95, 0.99)])
def test_adamws_betas_must_be_two_numbers_below_one(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        OptimizerSettings(betas=betas)


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.325, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), (0.55, 0.55), (1.0, 0.1)],
)
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(progress, rate):
    assert LearningRate(maximum=2.0, warmup=0.1, final_ratio=0.1).share_at(progress) == pytest.approx(rate)


def test_a_decay_at_the_end_equals_transformers_schedule():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_wsd_schedule(optimizer, 10, 100, num_stable_steps=890, decay_type="linear", min_lr_ratio=0.1)
    schedule = LearningRate(maximum=2e-4, kind="wsd")
    for step in range(1001):
        if step >= 10:  # their warm-up does not start at zero
            assert schedule.share_at(step / 1000) == pytest.approx(theirs.get_last_lr()[0]), step
        optimizer.step()
        theirs.step()


def test_routers_warm_up_for_the_first_share_of_steps():
    warmup = RouterWarmup()
    assert [warmup.active(step, 10_000) for step in (0, 499, 500, 10_000)] == [True, True, False, False]


@pytest.mark.parametrize(("num_steps", "last"), [(1000, 79), (100, 79), (50, 39)])
def test_a_warm_up_takes_eighty_steps_or_most_of_a_shorter_run(num_steps, last):
    assert [RouterWarmup().active(step, num_steps) for step in (last, last + 1)] == [True, False]
    assert not RouterWarmup(share=0.0, min_steps=0).active(0, num_steps)


@pytest.mark.parametrize("wrong", [{"decay": 0.0}, {"final_ratio": 1.5}, {"warmup": 1.0}])
def test_an_invalid_learning_rate_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LearningRate(maximum=1.0, **wrong)


def test_beta_rises_if_the_smoothed_depth_is_too_large_and_falls_if_it_is_too_small():
    deep, shallow = BetaControl(beta=0.1, target=0.5), BetaControl(beta=0.1, target=0.5)
    deep.observe_depth(0.9, LONG_RUN)
    shallow.observe_depth(0.2, LONG_RUN)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))
    deep.observe_depth(0.4, LONG_RUN)
    assert deep.depth == pytest.approx(0.98 * 0.9 + 0.02 * 0.4)
    assert deep.beta > 0.1 * math.exp(0.05 * 0.4)


@pytest.mark.parametrize(("depth", "bound"), [(1.0, 1.0), (0.0, 1e-3)])
def test_a_steered_beta_stays_within_its_bounds(depth, bound):
    steering = BetaControl(beta=0.1, target=0.5)
    for _ in range(500):
        steering.observe_depth(depth, LONG_RUN)
    assert steering.beta == bound


@pytest.mark.parametrize("num_steps", [97, 292, 634, 3906])
@pytest.mark.parametrize(("beta", "depth"), [(0.2, 0.4), (0.004, 0.85), (0.04, 0.3), (0.3, 0.95)])
def test_steering_reaches_its_depth_from_both_sides_in_short_and_long_runs(num_steps, beta, depth):
    """The depth of a toy model falls with log β, with a lag of ten steps."""
    steering, depths = BetaControl(beta, target=0.68), list[float]()
    for _ in range(num_steps):
        steering.observe_depth(depth, num_steps)
        depth += (1 / (1 + math.sqrt(steering.beta / 0.1)) - depth) / 10
        depths.append(depth)
    last = depths[-num_steps // 10 :]
    assert last == pytest.approx([0.68] * len(last), abs=0.03)


def test_without_a_target_beta_is_fixed():
    fixed = BetaControl(0.1)
    fixed.observe_depth(0.9, LONG_RUN)
    assert fixed == BetaControl(0.1)
