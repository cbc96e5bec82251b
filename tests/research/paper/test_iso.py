import pytest

from research.paper.iso import iso_flop_tokens, iso_speed_interval
from tests.model.test_flops import PER_MILLE, paper_flops


def test_the_papers_dense_models_of_equal_flops_are_trained_for_its_number_of_steps():
    for num_layers, num_steps, dense_layers, dense_steps in ((36, 23_731, 26, 39_646), (48, 30_211, 33, 50_729)):
        steps = iso_flop_tokens(paper_flops(num_layers, 4), paper_flops(dense_layers, 1), num_steps)
        assert steps == pytest.approx(dense_steps, rel=PER_MILLE)


def test_an_interval_of_equal_speed_needs_three_turns_and_contains_the_estimate():
    assert iso_speed_interval({6: [1.0, 1.0], 12: [2.0, 2.0]}, [1.5, 1.5]) is None
    dense, ours = {6: [1.0, 1.1, 0.9], 12: [2.0, 2.1, 1.9]}, [1.4, 1.5, 1.6]
    found = iso_speed_interval(dense, ours)
    assert found[0] < 9 < found[1]
    steady = iso_speed_interval({6: [1.0] * 3, 12: [2.0] * 3}, [1.5] * 3)
    assert steady == pytest.approx((9, 9))
