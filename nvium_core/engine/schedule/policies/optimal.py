"""The solved schedule: for every number of sequences, a table of what to run in every state, or whole passes.

Tables are solved when needed, from costs of blocks and exit frequencies as measured while serving. Solving blocks no
Step: until a table exists, and where there are too many states for one, thresholds decide.
"""

from collections.abc import Sequence as Items
from functools import lru_cache, partial
from typing import Self

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies
from nvium_core.engine.schedule.policies import semi_markov
from nvium_core.engine.schedule.policies.background import Background
from nvium_core.engine.schedule.policies.policy import Policy
from nvium_core.engine.schedule.policies.problem import Problem
from nvium_core.engine.schedule.policies.semi_markov import num_transitions, states
from nvium_core.engine.schedule.policies.threshold import Threshold
from nvium_core.engine.schedule.policies.tuning import simulated_rate, tune
from nvium_core.engine.schedule.policies.whole_pass import WholePass

MAX_SOLVED_SEQUENCES = 16
"""Beyond, gathering a quarter of them before going deeper is within thousandths of the best, and nothing is solved."""

MAX_TRANSITIONS = 25_000
"""The largest table, about ten milliseconds' work: 16 sequences and 4 blocks, or 4 and 12."""

INSTANT_TRANSITIONS = 2_000
"""Up to here a table is a few milliseconds' work, done where it is asked for: 8 sequences and 4 blocks."""

MIN_PASS_GAIN = 1.01
"""Over the staircase, below which passes are not worth giving it up."""

LEARN_EVERY = 7
"""Steps for one that is learnt from: a prime, so that all blocks have their turn."""

CHECK_EVERY = 32
"""Steps learnt from between two looks at whether costs or frequencies have drifted."""


class Table(Policy):
    """The best block for every state of so many sequences."""

    def __init__(self, problem: Problem, num_sequences: int) -> None:
        self._index = _index(num_sequences, problem.num_blocks)
        solution = semi_markov.solve(problem, num_sequences)
        self.rate = solution.rate
        """Tokens per second."""
        self._blocks = bytes(solution.block_S.tolist())

    def choose(self, num_waiting: Items[int]) -> int:
        return self._blocks[self._index[tuple(num_waiting)]]


@lru_cache(maxsize=64)
def _index(num_sequences: int, num_blocks: int) -> dict[tuple[int, ...], int]:
    rows = states(num_sequences, num_blocks).tolist()
    return {tuple(row): number for number, row in enumerate(rows)}


@lru_cache(maxsize=256)
def solved(problem: Problem, num_sequences: int) -> Policy:
    """The table, thresholds where it is too large, or whole passes where they are faster. Kept, as loads vary."""
    policy, rate = staircase(problem, num_sequences)
    return WholePass() if problem.pass_rate(num_sequences) > MIN_PASS_GAIN * rate else policy


def staircase(problem: Problem, num_sequences: int) -> tuple[Policy, float]:
    """The best policy that defers, and its tokens per second."""
    if num_transitions(num_sequences, problem.num_blocks) <= MAX_TRANSITIONS and num_sequences <= MAX_SOLVED_SEQUENCES:
        table = Table(problem, num_sequences)
        return table, table.rate
    is_few = num_sequences <= MAX_SOLVED_SEQUENCES
    thresholds = tune(problem, num_sequences) if is_few else Threshold.untuned(problem.num_blocks, num_sequences)
    is_compared = problem.pass_rate(num_sequences) > 0
    return thresholds, simulated_rate(problem, num_sequences, thresholds) if is_compared else 0.0


class Optimal(Policy):
    """Which of the blocks to run, by table. One thread chooses and observes; another solves."""

    passes_scored = True

    def __init__(self, costs: StepCosts, frequencies: ExitFrequencies, *, learns: bool = True) -> None:
        """Keeps both up to date from what it observes, unless they are known to be right: then every table is solved
        where it is asked for."""
        self.learns = learns
        self.costs = costs
        self.frequencies = frequencies
        self._num_observed = 0
        self._background = Background()
        self._start_over(self._measured())

    @classmethod
    def of(cls, costs: StepCosts, frequencies: ExitFrequencies, *, learns: bool = True) -> Self:
        return cls(costs, frequencies, learns=learns)

    def choose(self, num_waiting: Items[int]) -> int:
        num_sequences = sum(num_waiting)
        policy = self._policies.get(num_sequences) or self._begin(num_sequences)
        return policy.choose(num_waiting)

    def passes_whole(self, num_sequences: int) -> bool:
        policy = self._policies.get(num_sequences) or self._begin(num_sequences)
        return policy.passes_whole(num_sequences)

    def observe(
        self, block: int, *, num_rows: int, seconds: float | None, num_asked: int, num_left: int, follows: bool = False
    ) -> None:
        self._num_observed += 1
        if self.learns and self._num_observed % LEARN_EVERY == 0:
            if seconds is not None and not follows:  # a Step in another's call costs less than by itself
                self.costs.observe(block, num_rows, num_asked, seconds)
            self.frequencies.observe(block, num_asked, num_left)
            if self._num_observed % (LEARN_EVERY * CHECK_EVERY) == 0:
                self._refresh()

    def observe_pass(self, *, num_rows: int, seconds: float) -> None:
        if self.learns and self._num_observed % LEARN_EVERY == 0:
            self.costs.observe_pass(num_rows, seconds)

    def solve_now(self, num_sequences: int) -> None:
        self._policies[num_sequences] = solved(self._problem, num_sequences)

    def wait(self) -> None:
        self._background.wait()

    def _refresh(self) -> None:
        measured = self._measured()
        if not measured.is_near(self._problem):
            self._start_over(measured, self._policies)

    def _measured(self) -> Problem:
        return Problem.of(self.costs, self.frequencies.exit_probabilities).rounded()

    def _start_over(self, problem: Problem, stale: dict[int, Policy] | None = None) -> None:
        """Solve again what is needed from now on; stale policies serve until then."""
        self._problem = problem
        self._stale = stale or {}
        self._policies: dict[int, Policy] = {}

    def _begin(self, num_sequences: int) -> Policy:
        """A policy for a number of sequences met for the first time, to be replaced by a better one soon."""
        num_blocks, stale = self._problem.num_blocks, self._stale.get(num_sequences)
        is_instant = num_transitions(num_sequences, num_blocks) <= INSTANT_TRANSITIONS
        is_compared = self._problem.pass_rate(num_sequences) > 0
        is_at_hand = num_sequences > MAX_SOLVED_SEQUENCES and not is_compared
        if is_at_hand or not self.learns or (stale is None and is_instant):
            self.solve_now(num_sequences)
        else:
            self._policies[num_sequences] = stale or Threshold.untuned(num_blocks, num_sequences)
            self._background.do(partial(_replace, self._policies, self._problem, num_sequences))
        return self._policies[num_sequences]


def _replace(policies: dict[int, Policy], problem: Problem, num_sequences: int) -> None:
    policies[num_sequences] = solved(problem, num_sequences)
