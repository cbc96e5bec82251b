"""Drafts tokens by prompt lookup (Saxena 2023), if the last exit is likely to accept them. Torch-free.

The tokens that followed an earlier occurrence of a sequence's last tokens can be drafted, which costs no device time. A
tuner measures which limit on the number of draft tokens gives the most tokens per second.
"""

from collections import Counter
from collections.abc import Sequence as Items
from typing import NamedTuple

from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.tuner import Tuner

TUNED_LIMITS = 0, 2, 6  # the limits on draft tokens per sequence that the tuner compares
MIN_ACCEPTANCE = 0.3  # minimum estimated probability that all draft tokens are accepted

LENGTHS = 8, 4, 2, 1
"""Lengths of the n-grams to look up, longest first: a longer match is more likely to continue as before."""

INITIAL_HIT_RATES = {8: 0.75, 4: 0.55, 2: 0.3, 1: 0.1}
"""Initial hit rates by length, measured with SmolLM2-135M-Instruct at temperature 1."""

PRIOR_WEIGHT = 8
"""Weight of the hit rate over all texts, as a number of matches. The initial hit rate weighs four times as much."""

DECAY = 0.5 ** (1 / 2000)  # factor per match: after 2,000 more matches, a match counts half
MAX_LOOKBACK = 4096  # maximum tokens that a lookup adds to the index, at about 700 bytes each


class Match(NamedTuple):
    """The last `length` tokens also occur just before `end`. `hit_rate`: how likely the token at `end` is next."""

    length: int
    end: int
    hit_rate: float


class HitRates:
    """How often a match predicted the next token, by length of the match, over all texts."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(LENGTHS, 4.0 * PRIOR_WEIGHT)
        self._right = {length: 4 * PRIOR_WEIGHT * rate for length, rate in INITIAL_HIT_RATES.items()}

    def learn(self, length: int, is_right: bool) -> None:
        self._found[length] = DECAY * self._found[length] + 1
        self._right[length] = DECAY * self._right[length] + is_right

    def __getitem__(self, length: int) -> float:
        return self._right[length] / self._found[length]


class Ngrams:
    """Index of a growing text's n-grams, and hit rates of its matches. `others`: hit rates of similar texts."""

    def __init__(self, others: HitRates) -> None:
        self._others = others
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._last: Match | None = None
        self._found, self._right = Counter[int](), Counter[int]()

    def find(self, token_ids: Items[int], stop: int) -> Match | None:
        """Return the match of the longest n-gram that ends at `stop` and also occurs earlier. None if there is none."""
        self._learn(token_ids, stop)
        for end in range(max(self._num_indexed, stop - MAX_LOOKBACK), stop):
            for length in LENGTHS:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_indexed, self._last = stop, None
        for length in LENGTHS:
            if length < stop and (known := self._ends.get(tuple(token_ids[stop - length : stop]))):
                right = self._right[length] + PRIOR_WEIGHT * self._others[length]
                self._last = Match(length, known, right / (self._found[length] + PRIOR_WEIGHT))
                break
        return self._last

    def _learn(self, token_ids: Items[int], stop: int) -> None:
        """Update the hit rates with the last match, even if no token was drafted."""
        if self._last is not None and stop > self._num_indexed:
            length, end, _ = self._last
            is_right = token_ids[end] == token_ids[self._num_indexed]
            self._found[length] += 1
            self._right[length] += is_right
            self._others.learn(length, is_right)


def continuation(token_ids: Items[int], end: int, stop: int, number: int) -> list[int]:
    """Return `number` tokens from index `end` on. If there are fewer before `stop`, repeat them."""
    return [token_ids[end + ahead % (stop - end)] for ahead in range(number)]


class Drafting:
    """Chooses drafts of at most `max_drafts` tokens. 0 disables drafts; None lets a tuner choose the limit."""

    def __init__(self, max_drafts: int | None = None) -> None:
        self.is_off = max_drafts == 0
        self.tuner = Tuner(TUNED_LIMITS if max_drafts is None else (max_drafts,))
        self._hit_rates = {False: HitRates(), True: HitRates()}
        """Hit rates of requests at temperature 0 (True) and of all other requests (False)."""
        self._ngrams: dict[Sequence, Ngrams] = {}
        self.num_drafted = self.num_accepted = 0

    def drafts_for(self, sequence: Sequence, num_running: int) -> Items[int]:
        """Return draft tokens: the tokens that followed an earlier occurrence of the sequence's last tokens."""
        if self.is_off or not sequence.may_draft or sequence.num_drafts:
            return ()
        if sequence not in self._ngrams:
            self._ngrams[sequence] = Ngrams(self._hit_rates[sequence.params.temperature == 0])
        match = self._ngrams[sequence].find(sequence.token_ids, sequence.num_verified)
        number = self.tuner.choose(num_running) if match else 0
        while match and number and match.hit_rate**number < MIN_ACCEPTANCE:
            number -= 1
        return continuation(sequence.token_ids, match.end, sequence.num_tokens, number) if match and number else ()

    def record(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def forget(self, sequence: Sequence) -> None:
        self._ngrams.pop(sequence, None)
