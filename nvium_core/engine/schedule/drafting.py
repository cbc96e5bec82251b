"""How many tokens an exit drafts before the last one verifies them, and which exit: by what Steps cost, and how often
drafts were the last exit's tokens. Torch-free; blocks count from 0.

A round of m drafts runs the drafting blocks m + 1 times with a row of each sequence, and the others once with m + 1
rows. It emits as many tokens as were drafted right in a row, and one more.
"""

from nvium_core.engine.schedule.costs import StepCosts, at

MAX_DRAFTS = 8
HALF_LIFE = 500
"""Drafts of an exit until what was seen before counts half."""

PRIOR_DRAFTS, PRIOR_SHARE = 8, 0.5
"""How many drafts the first guess of the share of right ones counts for."""

LOOK_EVERY = 64
"""Rounds without drafts until one is drafted to see whether it would be right."""

LEARN_EVERY = 32
"""Rounds with drafts until the number of drafts is decided anew."""

MIN_GAIN = 1.02
"""Over the dense schedule, below which nothing is drafted."""


class Drafting:
    """`most` fixes the number of drafts in a row; None lets costs decide. `head_share` is how much of a junction's cost
    a draft has."""

    def __init__(self, costs: StepCosts, most: int | None = None, *, head_share: float = 1.0) -> None:
        self._costs = costs
        self._head_share = head_share
        self._most = most
        self._tested = [float(PRIOR_DRAFTS)] * max(costs.num_blocks - 1, 0)
        self._right = [PRIOR_DRAFTS * PRIOR_SHARE] * len(self._tested)
        self._plans: dict[int, tuple[int, int]] = {}
        self._num_unseen = self._num_observed = 0
        self.num_drafted = self.num_accepted = 0
        """In all so far."""

    @classmethod
    def never(cls) -> "Drafting":
        return cls(StepCosts.linear([1.0], [0.0]), 0)

    def plan(self, num_sequences: int) -> tuple[int, int]:
        """Block and number of drafts in a row, 0 where the dense schedule is as fast."""
        if not self._tested or self._most == 0:
            return 0, 0
        if num_sequences not in self._plans:
            self._plans[num_sequences] = self._best(num_sequences)
        block, most = self._plans[num_sequences]
        is_look = most == 0 and self._num_unseen >= LOOK_EVERY
        return block, 1 if is_look else most

    def observe(self, block: int, num_drafted: int, num_right: int) -> None:
        """A round is over: so many drafts from behind this block began with so many that were right."""
        if not num_drafted:
            self._num_unseen += 1
            return
        num_tested = min(num_right + 1, num_drafted)
        self._num_unseen = 0
        self.num_drafted += num_drafted
        self.num_accepted += num_right
        kept = 0.5 ** (num_tested / HALF_LIFE)
        self._tested[block] = kept * self._tested[block] + num_tested
        self._right[block] = kept * self._right[block] + num_right
        self._num_observed += 1
        if self._num_observed % LEARN_EVERY == 0:
            self._plans.clear()

    def right(self, block: int) -> float:
        """The share of an exit's drafts that were right."""
        return self._right[block] / self._tested[block]

    def _best(self, num_sequences: int) -> tuple[int, int]:
        most = range(self._most, self._most + 1) if self._most else range(1, MAX_DRAFTS + 1)
        plans = [(block, number) for block in range(len(self._tested)) for number in most]
        gains = [self.gain(block, number, num_sequences) for block, number in plans]
        block, number = plans[gains.index(max(gains))]
        return block, number if self._most or max(gains) > MIN_GAIN else 0

    def gain(self, block: int, most: int, num_sequences: int) -> float:
        """Tokens per second over the dense schedule's."""
        costs, n = self._costs, num_sequences
        right, later = self.right(block), range(block + 1, costs.num_blocks)
        tokens = sum(right**number for number in range(most + 1))
        drafting = (
            sum(costs.seconds_following(early, n) for early in range(block + 1)) + costs.own[0] + costs.own[1] * n
        )
        verifying = sum(costs.seconds_following(late, (most + 1) * n) for late in later)
        asking = most * self._head_share * at(costs.junctions[block], n) + at(costs.junctions[-1], (most + 1) * n)
        dense = drafting + sum(costs.seconds_following(late, n) for late in later) + at(costs.junctions[-1], n)
        dense = min(dense, costs.pass_seconds(n))
        return tokens * dense / ((most + 1) * drafting + verifying + asking)
