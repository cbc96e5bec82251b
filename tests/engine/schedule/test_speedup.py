"""The gauge of the speed-up against what the dense schedule takes for the same tokens. Without any model."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import POLICIES, Policy
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.speedup import MEMORY_SECONDS, PiggybackSpeedup
from nvium_core.engine.schedule.step import Run, Step
from tests.random_models import random_model

PAPER, SHALLOW = (0.146, 0.26, 0.345, 0.247), (0.4, 0.3, 0.2, 0.1)
NANOSECOND = 1e-9
"""So short that nothing fades."""

NEVER = 10**9


@dataclass(frozen=True)
class Job:
    """How long a prompt is, and the block after which each token leaves."""

    num_prompt_tokens: int
    exits: list[int]


class Drive:
    """The engine's scheduler and gauge, with exits and costs that are given."""

    def __init__(self, schedule: Schedule, costs: StepCosts, jobs: list[Job], *, num_pages: int, **limits: int) -> None:
        config = EngineConfig(**limits)  # type: ignore[arg-type]
        pool = PagePool(num_pages, page_size=2, keeps_pages=False)
        self.costs = costs
        policy = policy_of(schedule, costs, jobs, config.max_sequences)
        self.scheduler = Scheduler(policy, pool, config, num_blocks=costs.num_blocks)
        self.speedup = PiggybackSpeedup(max_rows_per_step=config.max_rows_per_step)
        self.speedup.costs = costs
        self.seconds = 0.0
        self.exits: dict[Sequence, list[int]] = {}
        for number, job in enumerate(jobs):
            self._add(number, job)
        while (step := self.scheduler.schedule()) is not None:
            self._carry_out(step)

    def _add(self, number: int, job: Job) -> None:
        prompt, blocks = [0] * job.num_prompt_tokens, self.costs.num_blocks
        sequence = Sequence(str(number), prompt, SamplingParams(), seed=0, num_blocks=blocks, arrival=number)
        self.exits[sequence] = job.exits
        self.scheduler.add(sequence)

    def _carry_out(self, step: Step) -> None:
        self.speedup.begin(step, self.scheduler.running)
        for run in step.runs:
            run.sequence.advance(step.block, run.rows)
            if run.reaches_front:
                self._ask(run.sequence, step.block)
        seconds = self.costs.seconds(step.block, step.num_rows)
        self.speedup.end(seconds)
        self.seconds += seconds

    def _ask(self, sequence: Sequence, block: int) -> None:
        exits = self.exits[sequence]
        if block >= exits[sequence.num_generated]:
            sequence.append(0)
            if sequence.num_generated == len(exits):
                self.speedup.drop(sequence, self.scheduler.running)
                self.scheduler.remove(sequence)


def policy_of(schedule: Schedule, costs: StepCosts, jobs: list[Job], max_sequences: int) -> Policy:
    exits = [block for job in jobs for block in job.exits]
    routing = [exits.count(block) / len(exits) for block in range(costs.num_blocks)]
    policy = POLICIES[schedule].of(costs, ExitFrequencies(exit_probabilities(routing)))
    for number in range(1, max_sequences + 1):
        policy.solve_now(number)
    return policy


def random_jobs(count: int, routing: tuple[float, ...], prompts: tuple[int, int], tokens: tuple[int, int]) -> list[Job]:
    draws = random.Random(str((count, routing, prompts, tokens)))
    blocks = range(len(routing))
    return [
        Job(draws.randint(*prompts), draws.choices(blocks, routing, k=draws.randint(*tokens))) for _ in range(count)
    ]


NUM_BLOCKS = 3
curves = st.lists(
    st.dictionaries(st.sampled_from([1, 2, 4, 16, 64]), st.integers(1, 50), min_size=1),
    min_size=NUM_BLOCKS,
    max_size=NUM_BLOCKS,
).map(lambda blocks: StepCosts({k: {r: t * NANOSECOND for r, t in block.items()} for k, block in enumerate(blocks)}))
exits = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=12)


@given(
    curves,
    st.lists(st.builds(Job, st.integers(1, 40), exits), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(4, 40),
    st.integers(26, 60),
)
def test_the_dense_schedule_is_not_faster_than_itself(
    costs: StepCosts, jobs: list[Job], max_sequences: int, chunk_rows: int, num_pages: int
) -> None:
    drive = Drive(
        "synchronous",
        costs,
        jobs,
        num_pages=num_pages,
        max_sequences=max_sequences,
        chunk_rows=chunk_rows,
        max_wait_steps=NEVER,
    )
    assert drive.speedup.ratio == pytest.approx(1, rel=1e-9)


@given(curves, exits, st.sampled_from(["sweep", "optimal"]))
def test_for_one_sequence_it_is_what_each_row_alone_would_have_taken(
    costs: StepCosts, early: list[int], schedule: Schedule
) -> None:
    last = NUM_BLOCKS - 1
    job = Job(1, [early[0], last, *early])
    drive = Drive(schedule, costs, [job], num_pages=20, max_sequences=1)
    passed = [last] * (len(job.exits) - 1) + job.exits[-1:]
    dense_seconds = sum(costs.seconds(block, 1) for deepest in passed for block in range(deepest + 1))
    assert drive.speedup.ratio == pytest.approx(dense_seconds / drive.seconds, rel=1e-6)


@pytest.mark.parametrize("schedule", ["sweep", "optimal"])
@pytest.mark.parametrize("num_sequences", [1, 3, 8])
@pytest.mark.parametrize("routing", [PAPER, SHALLOW])
@pytest.mark.parametrize(("prompts", "tokens"), [((1, 1), (80, 80)), ((5, 12), (30, 60)), ((5, 40), (100, 200))])
def test_in_company_it_is_near_what_the_dense_schedule_takes_for_the_same_tokens(
    schedule: Schedule,
    num_sequences: int,
    routing: tuple[float, ...],
    prompts: tuple[int, int],
    tokens: tuple[int, int],
) -> None:
    costs = StepCosts.linear([NANOSECOND] * 4, [NANOSECOND / 16] * 4)
    jobs = random_jobs(6 * num_sequences, routing, prompts, tokens)
    dense, drive = (
        Drive(name, costs, jobs, num_pages=10_000, max_sequences=num_sequences) for name in ("synchronous", schedule)
    )
    assert drive.speedup.ratio == pytest.approx(dense.seconds / drive.seconds, rel=0.05)


def test_steps_that_cannot_hold_everybody_are_full_in_the_dense_schedule_too() -> None:
    costs = StepCosts.linear([NANOSECOND] * 4, [NANOSECOND / 16] * 4)
    jobs = random_jobs(50, SHALLOW, (1, 1), (100, 100))
    drive = Drive("synchronous", costs, jobs, num_pages=10_000, max_sequences=50, max_rows_per_step=16)
    assert drive.speedup.ratio == pytest.approx(1, rel=0.02)


def test_prompts_whose_upper_blocks_were_never_needed_count_as_saved() -> None:
    costs = StepCosts.linear([NANOSECOND] * 4, [NANOSECOND / 16] * 4)
    drive = Drive("sweep", costs, [Job(80, [0, 0])], num_pages=100, max_sequences=1)
    spent = costs.seconds(0, 80) + costs.seconds(0, 1)
    assert drive.seconds == pytest.approx(spent)
    assert drive.speedup.ratio == pytest.approx((spent + 3 * 80 * NANOSECOND / 16) / spent)


def observed(speedup: PiggybackSpeedup, num_steps: int, num_rows: int) -> float:
    """The ratio after Steps of so many rows of one sequence, a second each."""
    sequence = Sequence("x", [0], SamplingParams(), seed=0, num_blocks=1, arrival=0)
    sequence.num_prefill_rows, sequence.filled = 1, [1]
    sequence.token_ids += [0] * num_rows
    for _ in range(num_steps):
        speedup.begin(Step(0, [run_of(sequence)]), [sequence])
        speedup.end(1.0)
    return speedup.ratio


def run_of(sequence: Sequence) -> Run:
    return Run(sequence, sequence.pending_rows(0), reaches_front=True)


def test_it_speaks_of_the_last_minute_or_so() -> None:
    speedup = PiggybackSpeedup(max_rows_per_step=256)
    speedup.costs = StepCosts.linear([1.0], [1e-9])
    assert observed(speedup, 600, num_rows=3) == pytest.approx(3, rel=1e-6)
    assert observed(speedup, round(MEMORY_SECONDS), num_rows=1) == pytest.approx(1 + 2 / math.e, rel=1e-3)
    assert observed(speedup, 600, num_rows=1) == pytest.approx(1, rel=1e-3)


def test_it_says_nothing_before_costs_are_known_and_tokens_spoken() -> None:
    engine = Engine(random_model([1, 2, 4]), EngineConfig(max_sequences=2))
    engine.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert math.isnan(engine.speedup.ratio)
    engine.calibrate()
    assert math.isnan(engine.speedup.ratio)
    engine.generate([[1, 2], [3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert 0 < engine.speedup.ratio < math.inf
