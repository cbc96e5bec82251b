import pytest

from nvium_core.training.collapse import Collapse
from tests.training.small_runs import small_recipe

RECIPE = small_recipe("total_tokens=25600")  # 100 steps, of which 20 warm up


def warnings_at(shares: list[list[float]], first_step: int) -> list[int]:
    watch = Collapse()
    reports = ({"step": step, "exit_probs": each} for step, each in enumerate(shares, first_step))
    return [report["step"] for report in reports if watch.advice(report, RECIPE)]


COLLAPSED, BALANCED = [0.99, 0.01], [0.9, 0.1]


def test_ten_steps_with_nearly_all_tokens_at_one_exit_are_one_warning():
    assert warnings_at([COLLAPSED] * 30, first_step=40) == [49]
    assert warnings_at([*[COLLAPSED] * 9, BALANCED] * 3, first_step=40) == []
    assert warnings_at([*[COLLAPSED] * 12, BALANCED, *[COLLAPSED] * 12], first_step=40) == [49, 62]
    assert warnings_at([[1.0]] * 30, first_step=40) == []


def test_the_router_warm_up_does_not_count():
    assert warnings_at([COLLAPSED] * 30, first_step=1) == [29]


@pytest.mark.parametrize(("shares", "change"), [([0.99, 0.01], "lower β"), ([0.01, 0.99], "raise β")])
def test_the_warning_names_the_settings_to_change(shares, change):
    watch = Collapse(num_steps=9)
    line = watch.advice({"step": 50, "exit_probs": shares}, RECIPE)
    assert f"{change} (beta.initial=0.002)" in line and "router_warmup.share=0.2" in line
