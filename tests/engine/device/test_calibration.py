"""What Steps cost: measured without a trace, or assumed."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from nvium_core import Engine, EngineConfig, InvalidRequest, NviumForCausalLM, SamplingParams
from nvium_core.engine.device import calibration, native
from nvium_core.engine.device.budget import Budget
from nvium_core.engine.device.calibration import (
    COARSE_ROWS,
    FIRST_PASSES,
    MANY_ROWS,
    MAX_SPREAD_ROWS,
    NEXT_PASSES,
    PASS_REPEATS,
    ROW_COUNTS,
    assumed_costs,
    choose_path,
    choose_threads,
    line,
    measure_costs,
    measure_passes,
    own_costs,
    rising,
)
from nvium_core.engine.device.calibration_cache import calibration_file
from nvium_core.engine.device.native.steps import MAX_RUN_ROWS
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.policies import Optimal
from nvium_core.engine.schedule.step import Step, StepResult
from tests.engine.device.graphs.engines import backend_of, graphs_engine
from tests.engine.driving import alone
from tests.full_disk import break_file
from tests.random_models import random_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
FITTING = tuple(rows for rows in ROW_COUNTS if rows <= 128)
"""What the model's context allows."""

PARAMS = SamplingParams(max_tokens=7, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    return random_model([1, 2, 4], seed=2, width=8, num_heads=2, num_key_heads=1, context=128)


def test_costs_are_assumed_in_proportion_to_the_layers() -> None:
    costs = assumed_costs(random_model([1, 3, 6]).config)
    for rows in (1, 5, 200):
        first, second, third = (costs.seconds(block, rows) for block in range(3))
        assert (second, third) == pytest.approx((2 * first, 3 * first))
    assert costs.seconds(0, 33) < 2 * costs.seconds(0, 1)


@pytest.mark.parametrize(
    ("settings", "row_counts"),
    [
        ({}, FITTING),
        ({"max_sequences": 1}, FITTING),
        ({"max_sequences": 3, "cache_tokens": 128 * 3}, FITTING),
        ({"context": 24, "cache_tokens": 24, "max_sequences": 1}, (1, 2, 4, 8, 12, 16, 24)),
        ({"context": 24, "cache_tokens": 48, "max_sequences": 2}, (1, 2, 4, 8, 12, 16, 24, 32)),
    ],
    ids=["room for all", "one seat", "three seats", "one small context", "two small contexts"],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_number_of_rows_that_fits_is_measured(
    model: NviumForCausalLM, settings: dict[str, int], row_counts: tuple[int, ...], deterministic: bool
) -> None:
    engine = Engine(model, EngineConfig(page_size=4, deterministic=deterministic, **settings))  # type: ignore[arg-type]
    points = engine.calibrate().points
    assert points.keys() == {0, 1, 2}
    for costs in points.values():
        assert tuple(costs) == row_counts
        assert min(costs.values()) > 0


class RunnerThatPauses(Runner):
    """Pauses for many rows in the first block, but for the third time; and longer where fronts are asked."""

    pause_seconds = 0.5
    num_pauses = 0

    def run(self, step: Step) -> list[StepResult]:
        num_asked = sum(run.reaches_front for run in step.runs)
        time.sleep((0.02 + 0.01 * num_asked) * (step.block == 1 and num_asked > 0))
        if (step.block, step.num_rows, num_asked) == (0, MAX_SPREAD_ROWS, 0):
            self.num_pauses += 1
            time.sleep(0 if self.num_pauses == 3 else self.pause_seconds)
        return super().run(step)


def test_blocks_without_their_junctions_are_measured_by_the_quickest_run(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(page_size=4, max_sequences=2), make_runner=RunnerThatPauses)
    costs = measure_costs(engine.runner, engine.pool, engine.model_config, max_sequences=2)
    assert all(tuple(block) == FITTING for block in costs.points.values())
    assert costs.seconds(0, MAX_SPREAD_ROWS) < RunnerThatPauses.pause_seconds / 2


class Noting(Runner):
    """How many rows, sequences and blocks each Step has."""

    noted: set[tuple[int, int, bool]]

    def run(self, step: Step) -> list[StepResult]:
        self.noted.add((step.num_rows, len(step.runs), step.following is not None))
        return super().run(step)


def test_rows_are_of_as_many_sequences_as_there_are_seats(model: NviumForCausalLM) -> None:
    Noting.noted = set()
    engine = Engine(model, EngineConfig(page_size=64, max_sequences=128), make_runner=Noting)
    costs = measure_costs(engine.runner, engine.pool, engine.model_config, max_sequences=128)
    assert {(rows, rows, is_pass) for rows in FITTING for is_pass in (False, True)} == Noting.noted
    assert tuple(costs.passes) == FITTING


def test_passes_are_timed_as_they_are_launched_ahead() -> None:
    engine = graphs_engine(random_model([1, 2], context=128), EngineConfig(max_sequences=4))
    config = engine.model_config
    measured = measure_passes(engine.runner, engine.pool, config, {1: 0.0, 4: 0.0}, Budget())
    assert 0 < measured[1] <= measured[4]
    num_passes = 2 * PASS_REPEATS * (FIRST_PASSES + NEXT_PASSES)
    assert backend_of(engine).passes.num_ahead == num_passes - 2 * PASS_REPEATS * FIRST_PASSES
    engine.check_idle()


def test_junctions_are_what_steps_take_longer_where_fronts_are_asked(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(page_size=4, max_sequences=8), make_runner=RunnerThatPauses)
    RunnerThatPauses.pause_seconds = 0.0
    fixed, each = measure_costs(engine.runner, engine.pool, engine.model_config, max_sequences=8).junctions[1]
    assert fixed + each >= 0.02
    assert each >= 0.009
    assert fixed + 8 * each >= 0.1


class RunnerWithAWay(Runner):
    """Is slow where native calls carry more than `most` rows, or where the layers carry fewer."""

    most = 0

    def run(self, step: Step) -> list[StepResult]:
        is_carried_natively = step.num_rows <= self.backend.max_native_rows
        time.sleep(0.03 * (is_carried_natively != (step.num_rows <= self.most)))
        return super().run(step)


@pytest.mark.parametrize(("most", "chosen"), [(0, MAX_RUN_ROWS), (64, 64), (128, 128), (256, 256)])
def test_prompts_are_carried_by_whatever_is_faster(most: int, chosen: int) -> None:
    engine = Engine(random_model([1, 2], context=256), EngineConfig(max_sequences=1), make_runner=RunnerWithAWay)
    RunnerWithAWay.most = most
    for _ in range(2):
        choose_path(engine.runner, engine.pool, engine.model_config)
        assert engine.runner.backend.max_native_rows == chosen
    engine.check_idle()


def test_prompts_for_which_there_is_no_room_decide_nothing(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(context=48, cache_tokens=48, page_size=4, max_sequences=1))
    choose_path(engine.runner, engine.pool, engine.model_config)
    assert engine.runner.backend.max_native_rows == MAX_RUN_ROWS


def test_a_line_goes_through_its_points_and_never_below_nothing() -> None:
    assert line({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx((1.0, 2.0))
    assert line({1: 5.0, 2: 3.0}) == (4.0, 0.0)
    assert line({1: 1.0, 2: 4.0}) == pytest.approx((0.0, 9 / 5))
    assert line({3: 0.5}) == (0.5, 0.0)
    assert line({}) == line({1: -1.0}) == line({1: -1.0, 2: -2.0}) == (0.0, 0.0)


def test_what_an_engine_takes_beside_its_runner_is_the_median_of_what_was_seen() -> None:
    assert own_costs([(1, 3.0), (2, 5.0), (1, 3.0), (2, 100.0), (2, 5.0), (1, 0.0)]) == pytest.approx((1.0, 2.0))


def test_every_step_is_expected_to_cost_what_the_engine_itself_takes(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(page_size=4, max_sequences=2))
    whole = engine.calibrate()
    bare = engine.speedup.costs
    assert bare is not None
    own = [whole.seconds(block, 4) - bare.seconds(block, 4) for block in range(3)]
    assert own[0] > 0
    assert own == pytest.approx([own[0]] * 3)
    engine.check_idle()


def test_a_number_of_rows_costs_no_more_than_a_larger_one() -> None:
    assert rising({1: 3.0, 2: 2.0, 4: 5.0, 8: 4.0}) == {1: 2.0, 2: 2.0, 4: 4.0, 8: 4.0}


def test_a_measurement_leaves_the_cache_as_it_was(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(schedule="synchronous", page_size=4, max_sequences=2))
    engine.generate([PROMPT], PARAMS)
    measure_costs(engine.runner, engine.pool, engine.model_config, max_sequences=2)
    assert engine.pool.num_free == engine.pool.num_pages
    engine.check_integrity()
    (again,) = engine.generate([PROMPT], PARAMS)
    assert engine.pool.num_rows_found == 8
    assert again.token_ids == alone(model, PROMPT, PARAMS).token_ids


def test_what_a_measurement_writes_over_is_not_found_again(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(schedule="synchronous", page_size=4, max_sequences=1, cache_tokens=128))
    long_prompt = [t % 17 for t in range(120)]
    (before,) = engine.generate([long_prompt], PARAMS)
    engine.calibrate()
    (after,) = engine.generate([long_prompt], PARAMS)
    assert engine.pool.num_rows_found < 116
    assert (before.token_ids, before.exits) == (after.token_ids, after.exits)


def test_an_engine_goes_by_what_was_measured_and_says_the_same(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(schedule="optimal"))
    (before,) = engine.generate([PROMPT], PARAMS)
    costs = engine.calibrate()
    policy = engine.scheduler.policy
    assert isinstance(policy, Optimal)
    assert policy.costs is costs
    (after,) = engine.generate([PROMPT], PARAMS)
    assert (before.token_ids, before.exits) == (after.token_ids, after.exits)


def test_a_busy_engine_is_not_measured(model: NviumForCausalLM) -> None:
    engine = Engine(model)
    engine.add("x", PROMPT, PARAMS)
    with pytest.raises(InvalidRequest, match="must be idle"):
        engine.calibrate()
    engine.cancel("x")
    engine.calibrate()


@pytest.mark.skipif(not native.knows(random_model([1, 2])), reason="no C++ compiler here")
def test_calibration_takes_the_fastest_number_of_threads_for_few_rows_and_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(random_model([1, 2]), EngineConfig(max_sequences=16))
    backend = engine.runner.backend
    assert isinstance(backend, native.NativeBackend)
    best = {1: 1, MANY_ROWS: 2}

    def pretended(runner: Runner, step: Step, turn: int) -> float:
        return abs(backend.threads.of(step.num_rows) - best[step.num_rows]) + 1.0

    monkeypatch.setattr(calibration, "seconds", pretended)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    choose_threads(engine.runner, engine.pool, engine.model_config, max_sequences=16)
    assert (backend.threads.few, backend.threads.many) == (1, 2)
    assert engine.pool.num_free == engine.pool.num_pages


def test_without_time_little_is_measured_and_the_engine_still_runs(model: NviumForCausalLM) -> None:
    engine = Engine(model, EngineConfig(page_size=4, max_sequences=8))
    costs = engine.calibrate(max_seconds=0.0)
    assert [tuple(block) for block in costs.points.values()] == [COARSE_ROWS[:1]] * 3
    assert costs.own == (0.0, 0.0)
    (told,) = engine.generate([PROMPT], PARAMS)
    assert told.token_ids == alone(model, PROMPT, PARAMS).token_ids
    engine.check_idle()


class SlowRunner(Runner):
    """Takes four milliseconds for a row."""

    def run(self, step: Step) -> list[StepResult]:
        time.sleep(0.004 * step.num_rows)
        return super().run(step)


def test_of_a_slow_model_few_numbers_of_rows_are_measured_the_coarse_ones_first(model: NviumForCausalLM) -> None:
    """Whole passes, too, of which many rows' are assumed to cost what their blocks do."""
    engine = Engine(model, EngineConfig(page_size=4, max_sequences=64), make_runner=SlowRunner)
    started = time.monotonic()
    costs = measure_costs(engine.runner, engine.pool, engine.model_config, max_sequences=64, budget=Budget(2.0))
    assert time.monotonic() - started < 6
    assert {1, 16} <= {*costs.points[0]} and 128 not in costs.points[0]
    assert costs.seconds(0, 256) > costs.seconds(0, 1)
    assert costs.passes[64] == pytest.approx(costs.apart(64))


def test_what_was_measured_is_remembered_for_the_same_conditions_only(
    model: NviumForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    configs = [EngineConfig(max_sequences=seats, calibrations=tmp_path) for seats in (2, 2, 3)]
    first, again, other = (Engine(model, config) for config in configs)
    measured = first.calibrate(remembers=True)
    (file,) = tmp_path.rglob("*.json")
    assert again.calibrate(max_seconds=0.0, remembers=True).as_dict() == measured.as_dict()
    assert again.runner.backend.max_native_rows == first.runner.backend.max_native_rows
    assert other.calibrate(max_seconds=0.0, remembers=True).as_dict() != measured.as_dict()
    file.write_text('{"costs": 3}', encoding="utf-8")
    assert again.calibrate(max_seconds=0.0, remembers=True).as_dict() != measured.as_dict()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_broken_disk_costs_the_memory_of_what_was_measured_and_nothing_else(
    model: NviumForCausalLM, tmp_path: Path
) -> None:
    engine = Engine(model, EngineConfig(max_sequences=2, calibrations=tmp_path))
    file = calibration_file(engine.runner, engine.config)
    break_file(file.with_suffix(f".{os.getpid()}"))
    with pytest.raises(OSError, match="Input/output error"):
        file.with_suffix(f".{os.getpid()}").write_text("x", encoding="utf-8")
    engine.calibrate(max_seconds=0.0, remembers=True)
    assert not file.exists()
    file.with_suffix(f".{os.getpid()}").unlink()
    engine.calibrate(max_seconds=0.0, remembers=True)
    assert file.exists()
