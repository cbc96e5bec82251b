"""The solved schedule: for every number of sequences, a table of what to run in every state.

Tables are solved as they are needed, from what blocks cost and how often tokens leave as measured while serving.
Whoever asks never waits: until a table is there, and where there are too many states for one, thresholds decide.
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
from nvium_core.engine.schedule.policies.tuning import tune

MAX_SOLVED_SEQUENCES = 16
"""Beyond, gathering a quarter of them before going deeper is within thousandths of the best, and nothing is solved."""

MAX_TRANSITIONS = 25_000
"""The largest table, about ten milliseconds' work: 16 sequences and 4 blocks, or 4 and 12."""

INSTANT_TRANSITIONS = 2_000
"""Up to here a table is a few milliseconds' work, done where it is asked for: 8 sequences and 4 blocks."""

LEARN_EVERY = 7
"""Steps for one that is learnt from: a prime, so that all blocks have their turn."""

CHECK_EVERY = 32
"""Steps learnt from between two looks at whether costs or frequencies have drifted."""


class Table(Policy):
    """The best block for every state of so many sequences."""

    def __init__(self, problem: Problem, num_sequences: int) -> None:
        self._index = _index(num_sequences, problem.num_blocks)
        self._blocks = bytes(semi_markov.solve(problem, num_sequences).block_S.tolist())

    def choose(self, num_waiting: Items[int]) -> int:
        return self._blocks[self._index[tuple(num_waiting)]]


@lru_cache(maxsize=64)
def _index(num_sequences: int, num_blocks: int) -> dict[tuple[int, ...], int]:
    rows = states(num_sequences, num_blocks).tolist()
    return {tuple(row): number for number, row in enumerate(rows)}


@lru_cache(maxsize=256)
def solved(problem: Problem, num_sequences: int) -> Policy:
    """The table, or thresholds where it is too large, tuned unless that gains nothing. Kept, as loads come and go."""
    if num_sequences > MAX_SOLVED_SEQUENCES:
        return Threshold.untuned(problem.num_blocks, num_sequences)
    if num_transitions(num_sequences, problem.num_blocks) <= MAX_TRANSITIONS:
        return Table(problem, num_sequences)
    return tune(problem, num_sequences)


class Optimal(Policy):
    """Which of the blocks to run, by table. One thread asks and tells; another one solves."""

    def __init__(self, costs: StepCosts, frequencies: ExitFrequencies) -> None:
        """Keeps both up to date from what it observes."""
        self.costs = costs
        self.frequencies = frequencies
        self._num_observed = 0
        self._background = Background()
        self._start_over(self._measured())

    @classmethod
    def of(cls, costs: StepCosts, frequencies: ExitFrequencies) -> Self:
        return cls(costs, frequencies)

    def choose(self, num_waiting: Items[int]) -> int:
        num_sequences = sum(num_waiting)
        policy = self._policies.get(num_sequences) or self._begin(num_sequences)
        return policy.choose(num_waiting)

    def observe(
        self, block: int, *, num_rows: int, seconds: float, num_asked: int, num_left: int, follows: bool = False
    ) -> None:
        self._num_observed += 1
        if self._num_observed % LEARN_EVERY == 0:
            self.costs.observe(block, num_rows, num_asked, seconds, follows=follows)
            self.frequencies.observe(block, num_asked, num_left)
            if self._num_observed % (LEARN_EVERY * CHECK_EVERY) == 0:
                self._refresh()

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
        """Solve anew whatever is asked for from now on; meanwhile the stale policies serve."""
        self._problem = problem
        self._stale = stale or {}
        self._policies: dict[int, Policy] = {}

    def _begin(self, num_sequences: int) -> Policy:
        """A policy for a number of sequences met for the first time, to be replaced by a better one soon."""
        num_blocks, stale = self._problem.num_blocks, self._stale.get(num_sequences)
        is_instant = num_transitions(num_sequences, num_blocks) <= INSTANT_TRANSITIONS
        if num_sequences > MAX_SOLVED_SEQUENCES or (stale is None and is_instant):
            self.solve_now(num_sequences)
        else:
            self._policies[num_sequences] = stale or Threshold.untuned(num_blocks, num_sequences)
            self._background.do(partial(_replace, self._policies, self._problem, num_sequences))
        return self._policies[num_sequences]


def _replace(policies: dict[int, Policy], problem: Problem, num_sequences: int) -> None:
    policies[num_sequences] = solved(problem, num_sequences)
