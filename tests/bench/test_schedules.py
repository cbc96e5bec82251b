"""The possible speed-up of tied blocks, from the costs of a pass."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.bench.contenders.contender import Generation, Workload
from nvium_core.bench.schedules import possible, rows_of_passes, tied_pass_seconds
from tests.random_models import random_model

Q4_MS = {1: 84.0, 2: 98.0, 4: 119.0, 8: 184.0, 16: 335.0}
"""Milliseconds of a pass of 24 layers of width 2048, by rows."""


def test_the_rows_of_passes_are_those_of_the_engine():
    engine = Engine(random_model([2, 4, 6], num_loops=3, context=256), EngineConfig(schedule="sweep"))
    engine.add("alone", [5], SamplingParams(max_tokens=200, seed=2, ignore_eos=True))
    exits, num_rows, num_passes = list[int](), Counter[int](), 0
    while engine.has_work:
        exits += [event.exit for event in engine.step()]
        for report in engine.reports:
            num_rows[report.block] += report.num_rows
        num_passes = sum(exits)
    share_R = rows_of_passes([exits], 3)
    assert set(exits) == {1, 2, 3}
    assert share_R.sum() == pytest.approx(1)
    assert share_R @ np.arange(4) == pytest.approx(num_rows.total() / num_passes)


def test_the_possible_speed_up_follows_from_costs_and_exits():
    workload = Workload(prompt=[1], num_sequences=1, num_tokens=1000)
    whole = Generation(seconds=4 * 84.0 * 1000, first_token_seconds=[0.0], token_ids=[[0] * 1000], exits=[[2] * 1000])
    assert possible(Q4_MS, whole, workload, 4) == pytest.approx(4 * 84 / (2 * 98), rel=1e-3)
    slow = replace(whole, seconds=2 * whole.seconds)
    assert possible(Q4_MS, slow, workload, 4) == pytest.approx(8 * 84 / (2 * 98 + 4 * 84), rel=1e-3)
    late = replace(whole, exits=[[4] * 1000])
    assert possible(Q4_MS, late, workload, 4) == 1


def test_several_streams_add_their_rows_and_rows_may_be_padded():
    one_or_three = np.array([0, 0.5, 0, 0.5])
    assert tied_pass_seconds(Q4_MS, one_or_three, 1) == pytest.approx((84 + (98 + 119) / 2) / 2)
    at_six = (119 + 184) / 2
    assert tied_pass_seconds(Q4_MS, one_or_three, 2) == pytest.approx(98 / 4 + 119 / 2 + at_six / 4)
    assert tied_pass_seconds(Q4_MS | {4: 200.0}, np.array([0, 0, 0, 0, 1.0]), 1) == 184
