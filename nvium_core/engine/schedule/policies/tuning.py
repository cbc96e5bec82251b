"""Thresholds for a number of sequences: the best of many tried at once in a fast simulation of counts.

Arrays: R simulations side by side, K blocks.
"""

from collections.abc import Iterable

import numpy as np

from nvium_core.engine.schedule.policies.problem import Floats, Problem
from nvium_core.engine.schedule.policies.semi_markov import Integers
from nvium_core.engine.schedule.policies.threshold import Threshold

NUM_STEPS = 1000
NUM_COMPARED_STEPS = 250
"""Where only the rate is asked for, while serving: of many sequences, so enough for a percent."""

NUM_WARM_UP_STEPS = 100
NUM_REPLICAS = 16
SHARES = (0.0, 0.06, 0.12, 0.18, 0.25, 0.32, 0.4, 0.5, 0.65, 0.8)
"""Candidates for a threshold, as shares of all sequences."""

NUM_ROUNDS = 2


def tune(problem: Problem, num_sequences: int) -> Threshold:
    """First one threshold for all blocks, then each block's in turn, the deepest first; seeded, so repeatable."""
    candidates = sorted({max(1, round(share * num_sequences)) for share in SHARES})
    best = _best(problem, num_sequences, ([candidate] * problem.num_blocks for candidate in candidates))
    for _ in range(NUM_ROUNDS):
        for block in range(problem.num_blocks - 1, 0, -1):
            nearby = {*candidates, max(1, best[block] - 1), best[block] + 1}
            tried = ([*best[:block], candidate, *best[block + 1 :]] for candidate in sorted(nearby))
            best = _best(problem, num_sequences, tried)
    return Threshold(best)


def simulated_rate(problem: Problem, num_sequences: int, policy: Threshold) -> float:
    """Tokens per second."""
    threshold_RK = np.repeat(np.array([policy.thresholds]), NUM_REPLICAS, axis=0)
    return float(_rates(problem, num_sequences, threshold_RK, NUM_COMPARED_STEPS).mean())


def _best(problem: Problem, num_sequences: int, tried: Iterable[list[int]]) -> list[int]:
    """The thresholds with the highest simulated rate."""
    thresholds = list(tried)
    threshold_RK = np.repeat(np.array(thresholds), NUM_REPLICAS, axis=0)
    rates_R = _rates(problem, num_sequences, threshold_RK)
    return thresholds[int(rates_R.reshape(-1, NUM_REPLICAS).mean(axis=1).argmax())]


def _rates(problem: Problem, num_sequences: int, threshold_RK: Integers, num_steps: int = NUM_STEPS) -> Floats:
    """Tokens per second of each simulation, all sequences starting at block 0."""
    rng = np.random.default_rng(0)
    seconds_KM, exit_K = problem.visit_seconds(num_sequences), np.array(problem.exit_probabilities)
    count_RK, every = np.zeros_like(threshold_RK), np.arange(len(threshold_RK))
    count_RK[:, 0] = num_sequences
    tokens_R, seconds_R = np.zeros(len(every)), np.zeros(len(every))
    for step in range(NUM_WARM_UP_STEPS + num_steps):
        block_R = _choose(count_RK, threshold_RK)
        moving_R = count_RK[every, block_R]
        leaving_R = rng.binomial(moving_R, exit_K[block_R])
        count_RK[every, block_R] = 0
        count_RK[every, 0] += leaving_R
        count_RK[every, (block_R + 1) % problem.num_blocks] += moving_R - leaving_R
        if step >= NUM_WARM_UP_STEPS:
            tokens_R += leaving_R
            seconds_R += seconds_KM[block_R, moving_R]
    return tokens_R / seconds_R


def _choose(count_RK: Integers, threshold_RK: Integers) -> Integers:
    """`Threshold.choose`, for all simulations at once."""
    rank_K = np.arange(1, count_RK.shape[1] + 1)
    is_ready_RK = count_RK >= threshold_RK
    is_ready_RK[:, 0] = count_RK[:, 0] > 0
    deepest_ready_R = (is_ready_RK * rank_K).max(axis=1)
    deepest_R = ((count_RK > 0) * rank_K).max(axis=1)
    return np.where(deepest_ready_R > 0, deepest_ready_R, deepest_R) - 1
