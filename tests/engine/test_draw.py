from itertools import product

import numpy as np
from scipy.stats import kstest

from nvium_core.engine.sampling_params import POSITIONS_AHEAD, Uniforms
from tests.reference import PURPOSES, uniform


def test_the_number_depends_on_every_argument_and_never_changes():
    variants = [uniform(*key) for key in product((0, 1, -1), (0, 1), (0, 1), (0, 1), PURPOSES)]
    assert len(set(variants)) == len(variants)
    assert uniform(0, 0, 0, 0, b"route") == 0.24154919656271812
    assert uniform(1234, 2, 17, 3, b"token") == 0.6397225186063689


def test_the_numbers_are_uniform_and_routing_does_not_predict_the_token():
    token, route = (np.array([uniform(seed, 0, 5, 1, purpose) for seed in range(20_000)]) for purpose in PURPOSES)
    assert kstest(route, "uniform").pvalue > 1e-4
    assert kstest(token, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(route, token)[0, 1]) < 0.03
    assert route.min() >= 0 and route.max() < 1


def test_numbers_of_a_sequence_are_those_of_its_positions_in_any_order():
    uniforms = Uniforms(-5, 2, num_exits=3)
    for position in (0, 1, POSITIONS_AHEAD - 1, POSITIONS_AHEAD, 2 * POSITIONS_AHEAD + 7, 5):
        expected = [uniform(-5, 2, position, exit_, purpose) for purpose in PURPOSES for exit_ in range(3)]
        assert np.frombuffer(uniforms.at(position)).tolist() == expected
