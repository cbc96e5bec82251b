"""Passes: everybody's rows through all blocks at once, mixed with staircases at will."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams, TokenEvent
from nvium_core.choices import Schedule
from nvium_core.engine.device import calibration
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.failures import DeviceLost
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.policies.optimal import Table, solved
from nvium_core.engine.schedule.policies.policy import Policy, deepest
from nvium_core.engine.schedule.policies.problem import Problem
from nvium_core.engine.schedule.policies.threshold import Threshold
from nvium_core.engine.schedule.policies.whole_pass import WholePass
from nvium_core.engine.schedule.step import Step, StepResult
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import simulate
from tests.engine.driving import alone, events_of, logprobs_of
from tests.engine.test_exactness import Request, check, configs, models, requests, served
from tests.random_models import random_model

EXITS = (0.25, 1 / 3, 0.5, 1.0)


class Fickle(Policy):
    """Any block, and passes whenever chance wants it."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)

    def passes_whole(self, num_sequences: int) -> bool:
        return self._draws.random() < 0.5

    def choose(self, num_waiting: Sequence[int]) -> int:
        return self._draws.choice([block for block, count in enumerate(num_waiting) if count])


@settings(max_examples=settings().max_examples // 2)
@given(models(), configs, st.lists(requests(), min_size=1, max_size=5), st.integers(0, 99))
def test_tokens_and_exits_equal_algorithm_1_however_passes_and_staircases_alternate(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request], seed: int
) -> None:
    engine = Engine(model, config)
    engine.scheduler.policy = Fickle(seed)
    check(model, served(engine, plan), plan)


class Comparing(Runner):
    """Holds Steps that are said to repeat the one before to that."""

    num_repeats = 0
    before: Step | None = None
    pages: dict[str, list[int]]

    def run(self, step: Step) -> list[StepResult]:
        if step.repeats:
            assert self.before is not None
            assert [run.sequence for run in step.runs] == [run.sequence for run in self.before.runs]
            for run, last in zip(step.runs, self.before.runs, strict=True):
                sequence, pages = run.sequence, self.pages[run.sequence.id]
                assert (run.rows, run.reaches_front) == (range(last.rows.stop, last.rows.stop + 1), True)
                assert sequence.num_tokens == run.rows.stop > sequence.num_prefill_rows
                assert sequence.pages[: len(pages)] == pages
            self.num_repeats += 1
        self.before, self.pages = step, {run.sequence.id: [*run.sequence.pages] for run in step.runs}
        return super().run(step)


@settings(max_examples=settings().max_examples // 2)
@given(models(), configs, st.lists(requests(), min_size=1, max_size=5))
def test_a_step_that_repeats_the_one_before_has_the_next_row_of_each_of_its_sequences(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request]
) -> None:
    engine = Engine(model, replace(config, schedule="synchronous"), make_runner=Comparing)
    check(model, served(engine, plan), plan)


def test_passes_repeat_each_other_until_somebody_comes_or_leaves() -> None:
    engine = Engine(random_model([1, 2, 4]), EngineConfig(schedule="synchronous"), make_runner=Comparing)
    assert isinstance(engine.runner, Comparing)
    for number, max_tokens in enumerate([12, 6]):
        engine.add(str(number), [1, 2, number], SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True))
    repeats = []
    while engine.has_work:
        before = engine.runner.num_repeats
        engine.step()
        repeats.append(engine.runner.num_repeats - before)
    assert repeats == [0, *[1] * 5, 0, *[1] * 5]


def test_a_pass_takes_one_step_of_the_engine_for_a_token_of_everybody() -> None:
    engine = Engine(random_model([1, 2, 4]), EngineConfig(schedule="synchronous", max_sequences=5))
    for number in range(5):
        engine.add(str(number), [1, 2, number], SamplingParams(max_tokens=6, seed=number, ignore_eos=True))
    for _ in range(6):
        events = engine.step()
        assert sorted(event.sequence_id for event in events) == list("01234")
        assert [report.block for report in engine.reports] == [1, 2, 3]
    assert not engine.has_work


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_scores_in_passes_are_those_of_a_full_forward(num_sequences: int) -> None:
    model = random_model([1, 2, 4], seed=5)
    params = SamplingParams(max_tokens=9, seed=2, logprobs=0, prompt_logprobs=True, ignore_eos=True)
    prompts = [[1, 2, number] for number in range(num_sequences)]
    engine = Engine(model, EngineConfig(schedule="synchronous"))
    for prompt, told in zip(prompts, engine.generate(prompts, params), strict=True):
        scores = [score.logprob for score in (*told.prompt_scores, *told.scores)]
        assert scores == pytest.approx(logprobs_of(model, [*prompt, *told.token_ids]), abs=1e-10)


class BrokenOnce(LayersBackend):
    """Fails once in the last block, and in the second whenever a poisoned sequence is along."""

    is_broken = True

    def run(self, step: Step) -> list[StepResult]:
        breaks = self.is_broken and step.block == 2 and len(step.runs) > 1
        self.is_broken = self.is_broken and not breaks
        if breaks or (step.block == 1 and any(run.sequence.id == "poisoned" for run in step.runs)):
            raise RuntimeError("a fault that was asked for")
        return super().run(step)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_that_breaks_is_gone_on_with_where_it_broke(temperature: float) -> None:
    model = random_model([1, 2, 4], seed=4)
    params = SamplingParams(max_tokens=7, seed=1, temperature=temperature, ignore_eos=True)
    prompts = {"one": [1, 2], "two": [3], "poisoned": [4, 4]}
    engine = Engine(model, EngineConfig(schedule="synchronous"), make_runner=partial(Runner, make_backend=BrokenOnce))
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, replace(params, seed=number))
    told: dict[str, list[tuple[int, int]]] = {name: [] for name in prompts}
    failed = []
    for event in events_of(engine):
        if isinstance(event, TokenEvent):
            told[event.sequence_id].append((event.token_id, event.exit))
        elif isinstance(event, FailureEvent):
            failed.append(event.sequence_id)
    assert failed == ["poisoned"]
    for number, name in enumerate(["one", "two"]):
        expected = alone(model, prompts[name], replace(params, seed=number))
        assert told[name] == list(zip(expected.token_ids, expected.exits, strict=True))


def problem(own: float, pass_seconds: float | None) -> Problem:
    """Four blocks of 1 ms, nothing for a row; a Step costs the engine `own` ms."""
    passes = None if pass_seconds is None else {1: pass_seconds, 64: pass_seconds}
    costs = StepCosts({block: {1: 1.0, 64: 1.0} for block in range(4)}, own=(own, 0.0), passes=passes)
    return Problem.of(costs, EXITS).rounded()


@pytest.mark.parametrize("num_sequences", [1, 4, 8, 40])
def test_passes_are_chosen_where_they_emit_more_tokens_a_second(num_sequences: int) -> None:
    assert not solved(problem(own=0.0, pass_seconds=4.0), num_sequences).passes_whole(num_sequences)
    assert not solved(problem(own=5.0, pass_seconds=None), num_sequences).passes_whole(num_sequences)
    best = WholePass if num_sequences > 1 else Table  # whose Steps share a call, as those of a pass do
    assert isinstance(solved(problem(own=5.0, pass_seconds=2.0), num_sequences), best)
    kind = Threshold if num_sequences > 16 else Table
    assert isinstance(solved(problem(own=0.0, pass_seconds=40.0), num_sequences), kind)


def test_what_a_pass_costs_is_learnt_and_kept() -> None:
    costs = StepCosts.from_dict(StepCosts({0: {1: 1.0}}, passes={1: 2.0, 4: 4.0}).as_dict())
    assert costs.pass_seconds(2) == pytest.approx(2 + 2 / 3)
    for _ in range(200):
        costs.observe_pass(4, 8.0)
    assert costs.pass_seconds(4) == pytest.approx(8.0, rel=0.01)
    assert costs.pass_seconds(1) == 2.0
    assert costs.copy().passes == costs.passes
    assert StepCosts({0: {1: 1.0}}).pass_seconds(3) == float("inf")


def test_calibration_measures_passes_and_an_engine_may_choose_them() -> None:
    engine = Engine(random_model([1, 2]), EngineConfig(max_sequences=4))
    assert engine.calibrate().passes.keys() == {1, 2, 4}
    engine.check_idle()


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_engine_s_own_costs_of_a_step_are_measured_where_passes_are_run(schedule: Schedule) -> None:
    """Without them the next choice would be for staircases, whose Steps would seem to cost the engine nothing."""
    assert sum(Engine(random_model([1, 2]), EngineConfig(schedule=schedule, max_sequences=8)).calibrate().own) > 0


class Lost(LayersBackend):
    """A device that has failed, or has no memory left."""

    error: Exception = RuntimeError()

    def run(self, step: Step) -> list[StepResult]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling ..."), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes do not match"), False),
    ],
    ids=["illegal access", "an accelerator out of memory", "cuBLAS", "out of memory", "an ordinary error"],
)
def test_a_device_that_is_lost_ends_the_engine_and_other_errors_their_sequences(
    error: Exception, is_lost: bool
) -> None:
    engine = Engine(random_model([1, 2]), make_runner=partial(Runner, make_backend=Lost))
    assert isinstance(engine.runner.backend, Lost)
    engine.runner.backend.error = error
    for number in range(3):
        engine.add(str(number), [1, 2], SamplingParams(max_tokens=2))
    if is_lost:
        with pytest.raises(DeviceLost):
            engine.step()
        assert engine.has_work
    else:
        assert [event.sequence_id for event in events_of(engine)] == ["0", "1", "2"]


def test_all_that_meets_a_device_does_so_while_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and graphs belong to the current device, whichever the tensors are on."""
    second, current = torch.device("cuda:1"), list[torch.device]()

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Noting(GraphsBackend):
        def __init__(self, model: NviumForCausalLM, cache: PagedCache) -> None:
            assert current == [second]
            super().__init__(model, cache)

        def prepare(self, max_rows: int, max_sequences: int) -> None:
            assert current == [second]

        def run(self, step: Step) -> list[StepResult]:
            assert current == [second]
            return [StepResult(step, errors={run.sequence: ValueError() for run in step.runs}, is_complete=True)]

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(NviumForCausalLM, "device", second)
    engine = Engine(random_model([1, 2]), make_runner=partial(Runner, make_backend=Noting))
    engine.runner.prepare(4, 4)
    engine.add("0", [1, 2], SamplingParams(max_tokens=2))
    assert [event.sequence_id for event in events_of(engine)] == ["0"]
    assert not current


def test_costs_are_learnt_only_where_the_device_was_waited_for() -> None:
    engine = Engine(random_model([1, 2]), EngineConfig(schedule="optimal"), make_runner=NeverWaits)
    before = engine.scheduler.policy.costs.as_dict()  # type: ignore[attr-defined]
    engine.generate([[1, 2]] * 3, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    assert engine.scheduler.policy.costs.as_dict() == before  # type: ignore[attr-defined]
    waiting = Engine(random_model([1, 2]), EngineConfig(schedule="optimal"))
    waiting.generate([[1, 2]] * 3, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    assert waiting.scheduler.policy.costs.as_dict() != before  # type: ignore[attr-defined]


class NeverWaits(Runner):
    """Returns before the device is done."""

    def run(self, step: Step) -> list[StepResult]:
        results = super().run(step)
        self.has_waited = False
        return results


def test_the_deepest_rows_go_before_a_pass() -> None:
    assert WholePass().choose([3, 1, 0]) == deepest([3, 1, 0]) == 1


def test_a_lone_sequence_runs_no_whole_passes_where_its_steps_share_a_call() -> None:
    """Each Step costs 1 by itself, half of it for the call: in one call a pass costs 2.5, and a staircase less."""
    costs = StepCosts({block: {1: 1.0, 64: 1.0} for block in range(4)}, own=(0.5, 0.0), passes={1: 2.5, 64: 2.5})
    policy = solved(Problem.of(costs, EXITS), 1)
    assert isinstance(policy, Table)
    assert policy.rate == pytest.approx(1 / (1.5 + 0.5 * 1.5), rel=0.05)


def test_a_busy_machine_s_passes_do_not_make_staircases_look_cheaper() -> None:
    costs = StepCosts({block: {1: 1.0, 8: 3.0} for block in range(4)}, passes={1: 3.0, 8: 9.0})
    before = costs.copy()
    for _ in range(100):
        costs.observe_pass(8, 27.0)
    assert costs.pass_seconds(8) == pytest.approx(27.0, rel=0.01)
    for block in range(4):
        assert costs.seconds(block, 8) / before.seconds(block, 8) == pytest.approx(3.0, rel=0.01)
        assert costs.seconds(block, 1) == 1.0


def test_a_slower_machine_s_staircases_do_not_make_passes_look_cheaper() -> None:
    costs = StepCosts({block: {1: 1.0, 8: 3.0} for block in range(4)}, passes={1: 3.0, 8: 9.0})
    for block in [0, 1, 2, 3] * 150:
        costs.observe(block, 8, 0, 9.0)
    assert costs.seconds(0, 8) == pytest.approx(9.0, rel=0.01)
    assert costs.pass_seconds(8) == pytest.approx(27.0, rel=0.03)
    assert costs.pass_seconds(1) == 3.0


SMALL_MODEL = StepCosts(
    {block: {1: 200e-6, 4: 270e-6, 8: 460e-6, 16: 790e-6, 32: 1340e-6} for block in range(4)},
    [(60e-6, 15e-6)] * 4,
    own=(58e-6, 1.8e-6),
    passes={1: 727e-6, 4: 1066e-6, 8: 1882e-6, 16: 3307e-6},
)
"""As measured on a CPU."""


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_passes_that_were_disturbed_while_they_were_measured_are_chosen_all_the_same(factor: float) -> None:
    """Someone else had the processor for a moment. The schedule is what undisturbed costs would have chosen, and the
    simulator promises no more than that."""
    seen = StepCosts(
        SMALL_MODEL.points,
        SMALL_MODEL.junctions,
        SMALL_MODEL.own,
        {rows: factor * seconds for rows, seconds in SMALL_MODEL.passes.items()},
    ).with_bounded_passes()
    machine = Machine(routing=(0.14, 0.23, 0.36, 0.27), costs=seen, config=EngineConfig(max_sequences=16))
    assert solved(machine.problem.rounded(), 16).passes_whole(16)
    optimal, dense = (
        simulate(machine, machine.policy(schedule), num_tokens=2000).tokens_per_second
        for schedule in ("optimal", "synchronous")
    )
    assert optimal == pytest.approx(dense, rel=0.02)


def test_calibration_believes_no_pass_that_costs_more_than_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_passes", lambda *_, **__: {1: 1000.0, 4: 4000.0})
    costs = Engine(random_model([1, 2]), EngineConfig(max_sequences=4)).calibrate()
    assert 0 < costs.pass_seconds(4) < 1
