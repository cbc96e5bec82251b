"""Which block next, solved: a semi-Markov decision process over how many sequences wait for each block.

Running block k moves all m that wait for it and takes seconds(k, m). Each leaves with probability w_k, which gains a
token and makes it wait for block 0, or goes on to block k + 1; from the last block all leave. The best policy earns the
most tokens per second. Found by relative value iteration on the transformed process of Schweitzer (1971), whose steps
all take the same time.

Arrays: S states, A pairs of a state and a non-empty block, T transitions, K blocks, M sequences moving.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from nvium_core.engine.schedule.policies.policy import Policy
from nvium_core.engine.schedule.policies.problem import Floats, Problem

Integers = NDArray[np.int64]

TOLERANCE = 1e-4
"""Iteration ends when the best rate is known to this relative error."""

MAX_ITERATIONS = 2000
LAZINESS = 0.8
"""Below 1, so that the transformed process has no period."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Tokens per second of the best policy, and its block for every state of `states`."""

    rate: float
    block_S: Integers


def num_transitions(num_sequences: int, num_blocks: int) -> int:
    """What solving takes, about: how many transitions the process has."""
    return comb(num_sequences + num_blocks - 1, num_blocks - 1) * (num_sequences + num_blocks)


@lru_cache(maxsize=64)
def states(num_sequences: int, num_blocks: int) -> Integers:
    """Every way to spread the sequences over the blocks, [S, K], in lexicographic order."""
    bars = list(combinations(range(num_sequences + num_blocks - 1), num_blocks - 1))
    edges = np.pad(np.array(bars, dtype=np.int64).reshape(len(bars), -1), ((0, 0), (1, 1)), constant_values=-1)
    edges[:, -1] = num_sequences + num_blocks - 1
    return np.diff(edges) - 1


class Process:
    """All that can happen to n sequences, flattened: pairs in order of their states, transitions of their pairs."""

    def __init__(self, problem: Problem, num_sequences: int) -> None:
        count_SK = states(num_sequences, problem.num_blocks)
        self.state_A, self.block_A = np.nonzero(count_SK)
        moving_A = count_SK[self.state_A, self.block_A]
        exit_A = np.array(problem.exit_probabilities)[self.block_A]
        self.tokens_A = moving_A * exit_A
        self.seconds_A = problem.visit_seconds(num_sequences)[self.block_A, moving_A]
        self.first_pair_S = np.searchsorted(self.state_A, np.arange(len(count_SK)))
        self.first_transition_A = np.concatenate([[0], np.cumsum(moving_A + 1)[:-1]])

        pair_T = np.repeat(np.arange(len(moving_A)), moving_A + 1)
        leaving_T = np.arange(len(pair_T)) - self.first_transition_A[pair_T]
        self.next_T = self._successors(count_SK, pair_T, moving_A, leaving_T)
        self.probability_T = binomial(moving_A[pair_T], leaving_T, exit_A[pair_T])

    def _successors(self, count_SK: Integers, pair_T: Integers, moving_A: Integers, leaving_T: Integers) -> Integers:
        """The state after each transition, found by its digits: a state is a number in base n + 1."""
        num_blocks = count_SK.shape[1]
        digit_K = (count_SK[0].sum() + 1) ** np.arange(num_blocks - 1, -1, -1)
        onward_K = np.roll(digit_K, -1)
        key_S = count_SK @ digit_K
        block_T, moving_T = self.block_A[pair_T], moving_A[pair_T]
        change_T = leaving_T * digit_K[0] + (moving_T - leaving_T) * onward_K[block_T] - moving_T * digit_K[block_T]
        return np.searchsorted(key_S, key_S[self.state_A][pair_T] + change_T)

    def expected(self, value_S: Floats) -> Floats:
        """The mean value of the state after each pair."""
        return np.add.reduceat(self.probability_T * value_S[self.next_T], self.first_transition_A)


def binomial(n: Integers, k: Integers, p: Floats) -> Floats:
    """P(k of n), elementwise."""
    largest = int(n.max())
    ways = np.array([[comb(i, j) for j in range(largest + 1)] for i in range(largest + 1)], dtype=np.float64)
    return ways[n, k] * p**k * (1 - p) ** (n - k)


def solve(problem: Problem, num_sequences: int) -> Solution:
    """The best block for every state, to within `TOLERANCE` of the best rate."""
    process = Process(problem, num_sequences)
    step_seconds = LAZINESS * process.seconds_A.min()
    pace_A = step_seconds / process.seconds_A
    value_S = np.zeros(len(process.first_pair_S))
    for _ in range(MAX_ITERATIONS):
        stay_A = value_S[process.state_A]
        worth_A = stay_A + pace_A * (process.tokens_A + process.expected(value_S) - stay_A)
        best_S = np.maximum.reduceat(worth_A, process.first_pair_S)
        rate_S = (best_S - value_S) / step_seconds
        value_S = best_S - best_S[0]
        if np.ptp(rate_S) <= TOLERANCE * rate_S.max():
            break
    return Solution(float(rate_S.max() + rate_S.min()) / 2, _blocks(process, worth_A, best_S))


def _blocks(process: Process, worth_A: Floats, best_S: Floats) -> Integers:
    """The deepest of the best blocks of every state."""
    is_best_A = worth_A >= best_S[process.state_A]
    return np.maximum.reduceat(np.where(is_best_A, process.block_A, -1), process.first_pair_S)


def rate_of(policy: Policy, problem: Problem, num_sequences: int) -> float:
    """Tokens per second of any policy that lets fronts go ahead, from the stationary distribution of its chain.

    Exact and slow: dense in the number of states. All sequences start at block 0.
    """
    process = Process(problem, num_sequences)
    chosen_S = np.array([policy.choose(row) for row in states(num_sequences, problem.num_blocks).tolist()])
    pairs_S = np.flatnonzero(process.block_A == chosen_S[process.state_A])
    chain_SS = _transition_matrix(process)[pairs_S]
    visits_S = _stationary(chain_SS)
    return float(visits_S @ process.tokens_A[pairs_S] / (visits_S @ process.seconds_A[pairs_S]))


def _transition_matrix(process: Process) -> Floats:
    """P(next state | pair), [A, S]."""
    matrix_AS = np.zeros((len(process.state_A), len(process.first_pair_S)))
    pair_T = np.searchsorted(process.first_transition_A, np.arange(len(process.next_T)), side="right") - 1
    np.add.at(matrix_AS, (pair_T, process.next_T), process.probability_T)
    return matrix_AS


def _stationary(chain_SS: Floats) -> Floats:
    """How the states that are reached from the last one, where all wait for block 0, share the steps."""
    reached_S = np.arange(len(chain_SS)) == len(chain_SS) - 1
    while not np.array_equal(reached_S, grown_S := reached_S | (chain_SS[reached_S] > 0).any(axis=0)):
        reached_S = grown_S
    inside = chain_SS[np.ix_(reached_S, reached_S)]
    equations = np.vstack([inside.T - np.eye(len(inside)), np.ones(len(inside))])
    share, *_ = np.linalg.lstsq(equations, np.append(np.zeros(len(inside)), 1.0), rcond=None)
    visits_S = np.zeros(len(chain_SS))
    visits_S[reached_S] = share
    return visits_S
