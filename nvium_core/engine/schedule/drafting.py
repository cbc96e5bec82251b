"""How many tokens are drafted before the last exit verifies them, and where drafts come from: an early exit, the
drafter, or the text itself, where its last tokens stood before. By what Steps cost, and how often drafts were the last
exit's tokens. Torch-free; blocks count from 0.

A round of m drafts of an exit runs the drafting blocks m + 1 times with a row of each sequence, and the others once
with m + 1 rows. The drafter and the text need no block: all of them run once with m + 1 rows. A round emits as many
tokens as were drafted right in a row, and one more. Each sequence copies from its own text, if its tokens save more
time than its rows add to everybody's round, in which nobody else copies or drafts.
"""

import math
from collections import Counter
from operator import attrgetter
from typing import NamedTuple

from nvium_core.engine.schedule.costs import StepCosts, at
from nvium_core.engine.schedule.ngrams import Shares
from nvium_core.engine.schedule.sequence import DRAFTER, LOOKUP

MAX_DRAFTS = 8
PACE_RATE = 0.1
"""How much of what a round without drafts says, in the logarithm, is believed of rounds of all sizes: machines become
slower or faster for all. Only once its size was seen `SETTLED` times."""

SETTLED = 64

ROUND_RATE = 0.01
"""How much of what others say is believed of their size alone, at least: of the first of a size it is a third, of the
t-th 1/(t + 2)."""

ROUND_SURPRISE = 1.1
"""No round counts as further from the expected than this factor, since beside other programs some take twice as long;
but the first of a size is believed if it is faster, as nothing else makes it so."""

HALF_LIFE = 500
"""Drafts of an exit until what was seen before counts half."""

PRIOR_DRAFTS, PRIOR_SHARE = 8, 0.3
"""How many drafts the first guess of the share of right ones counts for."""

LOOK_EVERY = 64
"""Rounds until one token is drafted from elsewhere, each place in its turn, to see whether it is right;
and none at all, to see what that takes. Of finds that are not copied, so many until one is."""

LEARN_EVERY = 32
"""Rounds until it is decided anew."""

MIN_GAIN = 1.02
"""Over the dense schedule, below which nothing is drafted."""


class Plan(NamedTuple):
    """So many drafts from there, and the tokens per second over the dense schedule's that they should bring."""

    source: int
    number: int
    gain: float


NOTHING = Plan(0, 0, 1.0)


class Drafting:
    """`most` fixes the number of drafts in a row; None lets costs decide. `head_share` is how much of the last exit's
    cost the head of a draft has."""

    def __init__(
        self, costs: StepCosts, most: int | None = None, *, head_share: float = 1.0, has_drafter: bool = False
    ) -> None:
        self._costs = costs
        self._head_share = head_share
        self._most = most
        self._planned = [*([DRAFTER] if has_drafter else []), *range(costs.num_blocks - 1)]
        self._numbers = [most] if most else [*range(1, MAX_DRAFTS + 1)]
        self._tested = dict.fromkeys(self._planned, float(PRIOR_DRAFTS))
        self._right = dict.fromkeys(self._planned, PRIOR_DRAFTS * PRIOR_SHARE)
        self._plans: dict[int, Plan] = {}
        self._copies: dict[int, list[float]] = {}
        self._known: dict[tuple[int, int], float] = {}
        """Seconds over the pace, by a round's rows, whoever's they are, and the drafter's tokens behind each."""
        self._times = Counter[tuple[int, int]]()
        """How often each was observed."""
        self._pace = 1.0
        self.copies_right = {False: Shares(), True: Shares()}
        """Where tokens are drawn, and where they are likeliest ones."""
        self._num_rounds = self._num_looks = self._num_declined = 0
        self.num_drafted = self.num_accepted = 0
        """In all so far."""
        self.rounds = Counter[tuple[int, int]]()
        """With so many drafts from there."""

    @classmethod
    def never(cls) -> "Drafting":
        return cls(StepCosts.linear([1.0], [0.0]), 0)

    @property
    def is_off(self) -> bool:
        return self._most == 0

    def plan(self, num_sequences: int) -> tuple[int, int]:
        """The block behind which tokens are drafted, or `DRAFTER`, and how many in a row: 0 where the dense schedule is
        as fast."""
        if not self._planned or self.is_off:
            return 0, 0
        if self._looks:
            look = self._num_looks % (len(self._planned) + 1)
            return (self._planned[look - 1], 1) if look else (0, 0)
        source, number, _ = self._decided(num_sequences)
        return source, number

    def num_copied(self, share: float, num_sequences: int) -> int:
        """How many tokens one sequence copies from where its last ones stood before, if that share of such copies is
        right: 0 where the plan is as fast."""
        plan = self._decided(num_sequences)
        if num_sequences not in self._copies:
            self._copies[num_sequences] = [self._cost_of_copies(most, num_sequences) for most in self._numbers]
        costs = self._copies[num_sequences]
        gains = [tokens_of(share, most) / cost for most, cost in zip(self._numbers, costs, strict=True)]
        best = max(gains)
        if best > max(plan.gain, MIN_GAIN):
            return self._numbers[gains.index(best)]
        self._num_declined += 1
        return self._numbers[0] if self._num_declined % LOOK_EVERY == 0 else 0

    def observe(self, source: int, num_drafted: int, num_right: int) -> None:
        """A round is over: so many drafts from there began with so many that were right."""
        self._num_looks += self._looks
        self._num_rounds += 1
        self.rounds[source, num_drafted] += 1
        if self._num_rounds % LEARN_EVERY == 0:
            self._plans.clear()
            self._copies.clear()
        if not num_drafted:
            return
        self.num_drafted += num_drafted
        self.num_accepted += num_right
        if source == LOOKUP:
            return
        num_tested = min(num_right + 1, num_drafted)
        kept = 0.5 ** (num_tested / HALF_LIFE)
        self._tested[source] = kept * self._tested[source] + num_tested
        self._right[source] = kept * self._right[source] + num_right

    def observe_seconds(self, num_rows: int, num_drafts: int, seconds: float, num_sequences: int) -> None:
        """A round took so long: its rows are of all sequences, `num_drafts` the drafter's behind each."""
        if num_rows > (max(self._numbers) + 1) * num_sequences:
            return
        key, is_dense = (num_rows, num_drafts), num_rows == num_sequences and not num_drafts
        expected, times = self._seconds(*key, num_sequences), self._times[key]
        if not times:
            expected = min(expected, seconds)
        change = math.log(min(max(seconds / expected, 1 / ROUND_SURPRISE), ROUND_SURPRISE))
        self._times[key] += 1
        if is_dense and times >= SETTLED:
            self._pace *= math.exp(change * PACE_RATE)
        else:
            self._known[key] = expected / self._pace * math.exp(change * max(ROUND_RATE, 1 / (3 + times)))

    @property
    def _looks(self) -> bool:
        return self._num_rounds >= self._num_looks * LOOK_EVERY

    def right(self, source: int) -> float:
        """The share of drafts from there that were right."""
        return self._right[source] / self._tested[source]

    def _decided(self, num_sequences: int) -> Plan:
        if num_sequences not in self._plans:
            plans = [
                Plan(source, most, self.gain(source, most, num_sequences))
                for source in self._planned
                for most in self._numbers
            ]
            best = max(plans, key=attrgetter("gain"), default=NOTHING)
            self._plans[num_sequences] = best if best.gain > MIN_GAIN or self._most else NOTHING
        return self._plans[num_sequences]

    def gain(self, source: int, most: int, num_sequences: int) -> float:
        """Tokens per second over the dense schedule's."""
        dense, round_ = self._dense(num_sequences), self._round(source, most, num_sequences)
        return tokens_of(self.right(source), most) * dense / round_

    def limit(self, rounds: Counter[tuple[int, int]], num_right: int, num_sequences: int) -> float:
        """Tokens per second over the dense schedule's, by what such rounds cost, with so many right drafts in all."""
        seconds = sum(times * self._round(*round_, num_sequences) for round_, times in rounds.items())
        return (rounds.total() + num_right) * self._dense(num_sequences) / seconds

    def _dense(self, n: int) -> float:
        """Seconds of a token of each sequence without drafts."""
        return self._seconds(n, 0, n)

    def _round(self, source: int, most: int, n: int) -> float:
        """Seconds of so many drafts of each sequence, and of verifying them."""
        if source == LOOKUP:
            return self._dense(n) * self._cost_of_copies(most, n)
        if source == DRAFTER or not most:
            return self._seconds((most + 1) * n, most, n)
        costs = self._costs
        early = sum(costs.seconds_following(block, n) for block in range(source + 1))
        drafting = self._own(n) + early + at(costs.junctions[source], n) + self._of_head(n)
        return most * drafting + self._own(n) + early + self._of_blocks(source + 1, (most + 1) * n)

    def _cost_of_copies(self, most: int, n: int) -> float:
        """What so many copies of one sequence make its share of a round, over its share of one without, if nobody else
        copies."""
        dense, with_copies = self._at_most(n, n), self._at_most(n + most, n)
        return 1 + n * (with_copies - dense) / dense

    def _at_most(self, rows: int, n: int) -> float:
        """Seconds of a round of so many rows. More rows take no less: one that seems to take longer than larger ones
        was disturbed."""
        larger = range(rows + 1, n + max(self._numbers) + 1)
        return min(self._seconds(each, 0, n) for each in [rows, *larger] if each == rows or (each, 0) in self._known)

    def _seconds(self, rows: int, by_drafter: int, n: int) -> float:
        """What rounds with so many rows of n sequences in all took. Of a size not seen yet: what the nearest smaller
        size took that was seen, or the dense round, and what the other rows add by what blocks cost."""
        if known := self._known.get((rows, by_drafter)):
            return known * self._pace
        if rows == n and not by_drafter:
            return min(self._own(n) + self._of_blocks(0, n), self._costs.pass_seconds(n))
        fewer = next((fewer for fewer in range(rows, n, -1) if (fewer, 0) in self._known), n)
        more = self._of_blocks(0, rows) - self._of_blocks(0, fewer)
        return self._seconds(fewer, 0, n) + more + by_drafter * self._of_head(n)

    def _of_head(self, n: int) -> float:
        """Seconds of a draft's part of the head."""
        return self._head_share * at(self._costs.junctions[-1], n)

    def _of_blocks(self, first: int, rows: int) -> float:
        """Seconds of the blocks from this one on, and of the last exit."""
        blocks = sum(self._costs.seconds_following(block, rows) for block in range(first, self._costs.num_blocks))
        return blocks + at(self._costs.junctions[-1], rows)

    def _own(self, n: int) -> float:
        return self._costs.own[0] + self._costs.own[1] * n


def tokens_of(share: float, most: int) -> float:
    """That a round of so many drafts brings, if each behind a right one is right so often."""
    return (1 - share ** (most + 1)) / (1 - share) if share < 1 else most + 1.0
