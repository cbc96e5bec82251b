"""How many tokens are drafted before the last exit verifies them, and who drafts, an early exit or the drafter: by what
Steps cost, and how often drafts were the last exit's tokens. Torch-free; blocks count from 0.

A round of m drafts of an exit runs the drafting blocks m + 1 times with a row of each sequence, and the others once
with m + 1 rows. The drafter needs no block: all of them run once with m + 1 rows. A round emits as many tokens as were
drafted right in a row, and one more.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.costs import StepCosts, at
from nvium_core.engine.schedule.sequence import DRAFTER

MAX_DRAFTS = 8
HALF_LIFE = 500
"""Drafts of an exit until what was seen before counts half."""

PRIOR_DRAFTS, PRIOR_SHARE = 8, 0.3
"""How many drafts the first guess of the share of right ones counts for."""

LOOK_EVERY = 64
"""Rounds until one token is drafted from elsewhere, each place in its turn, to see whether it is right."""

LEARN_EVERY = 32
"""Rounds with drafts until the number of drafts is decided anew."""

MIN_GAIN = 1.02
"""Over the dense schedule, below which nothing is drafted."""


class Drafting:
    """`most` fixes the number of drafts in a row; None lets costs decide. `head_share` is how much of the last exit's
    cost the head of a draft has."""

    def __init__(
        self, costs: StepCosts, most: int | None = None, *, head_share: float = 1.0, has_drafter: bool = False
    ) -> None:
        self._costs = costs
        self._head_share = head_share
        self._most = most
        drafting: Items[int] = [*([DRAFTER] if has_drafter else []), *range(costs.num_blocks - 1)]
        self._tested = dict.fromkeys(drafting, float(PRIOR_DRAFTS))
        self._right = dict.fromkeys(drafting, PRIOR_DRAFTS * PRIOR_SHARE)
        self._plans: dict[int, tuple[int, int]] = {}
        self._num_rounds = self._num_looks = self._num_observed = 0
        self.num_drafted = self.num_accepted = 0
        """In all so far."""

    @classmethod
    def never(cls) -> "Drafting":
        return cls(StepCosts.linear([1.0], [0.0]), 0)

    def plan(self, num_sequences: int) -> tuple[int, int]:
        """The block behind which tokens are drafted, or `DRAFTER`, and how many in a row: 0 where the dense schedule is
        as fast."""
        if not self._tested or self._most == 0:
            return 0, 0
        if num_sequences not in self._plans:
            self._plans[num_sequences] = self._best(num_sequences)
        if self._looks:
            return [*self._tested][self._num_looks % len(self._tested)], 1
        return self._plans[num_sequences]

    def observe(self, block: int, num_drafted: int, num_right: int) -> None:
        """A round is over: so many drafts from behind this block began with so many that were right."""
        self._num_looks += self._looks
        self._num_rounds += 1
        if not num_drafted:
            return
        num_tested = min(num_right + 1, num_drafted)
        self.num_drafted += num_drafted
        self.num_accepted += num_right
        kept = 0.5 ** (num_tested / HALF_LIFE)
        self._tested[block] = kept * self._tested[block] + num_tested
        self._right[block] = kept * self._right[block] + num_right
        self._num_observed += 1
        if self._num_observed % LEARN_EVERY == 0:
            self._plans.clear()

    @property
    def _looks(self) -> bool:
        return self._num_rounds // LOOK_EVERY > self._num_looks

    def right(self, block: int) -> float:
        """The share of drafts from there that were right."""
        return self._right[block] / self._tested[block]

    def _best(self, num_sequences: int) -> tuple[int, int]:
        most = range(self._most, self._most + 1) if self._most else range(1, MAX_DRAFTS + 1)
        plans = [(block, number) for block in self._tested for number in most]
        gains = [self.gain(block, number, num_sequences) for block, number in plans]
        block, number = plans[gains.index(max(gains))]
        return block, number if self._most or max(gains) > MIN_GAIN else 0

    def gain(self, block: int, most: int, num_sequences: int) -> float:
        """Tokens per second over the dense schedule's."""
        tokens = sum(self.right(block) ** number for number in range(most + 1))
        return tokens * self._dense(num_sequences) / self._round(block, most, num_sequences)

    def _dense(self, n: int) -> float:
        """Seconds of a token of each sequence without drafts."""
        costs = self._costs
        blocks = sum(costs.seconds_following(block, n) for block in range(costs.num_blocks))
        return min(self._own(n) + blocks + at(costs.junctions[-1], n), costs.pass_seconds(n))

    def _round(self, block: int, most: int, n: int) -> float:
        """Seconds of so many drafts of each sequence, and of verifying them."""
        costs, rows = self._costs, (most + 1) * n
        heads = most * self._head_share * at(costs.junctions[-1], n)
        later = sum(costs.seconds_following(late, rows) for late in range(block + 1, costs.num_blocks))
        verifying = later + at(costs.junctions[-1], rows)
        if block == DRAFTER:
            return heads + min(self._own(n) + verifying, costs.pass_seconds(rows))
        early = sum(costs.seconds_following(early, n) for early in range(block + 1))
        return (most + 1) * (self._own(n) + early) + most * at(costs.junctions[block], n) + heads + verifying

    def _own(self, n: int) -> float:
        return self._costs.own[0] + self._costs.own[1] * n
