import math

import pytest
import torch
from transformers import get_wsd_schedule

from nvium_core.training.schedule import LearningRate, RouterWarmup


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
