"""Where a sequence's last tokens stood before, so that what followed them there can be drafted again: prompt lookup
decoding (Saxena 2023). It knows text and nothing else, so it costs no device time. Torch-free."""

from collections import Counter
from collections.abc import Sequence as Items
from typing import NamedTuple

LENGTHS = 8, 4, 2, 1
"""Tokens of the n-grams that are looked up, the longest first: the longer, the likelier the text goes on as before."""

FIRST_GUESSES = {8: 0.75, 4: 0.55, 2: 0.3, 1: 0.1}
"""How likely, before anything was seen: of what SmolLM2-135M-Instruct says at temperature 1; at 0 more."""

GUESS_WEIGHT = 8
"""Finds in a text that what is known from others counts for; the first guess counts for four times as many."""

KEPT = 0.5 ** (1 / 2000)
"""Decay of the statistics with every find: half is left after 2,000."""

MAX_LOOKBACK = 4096
"""Tokens before the first lookup that are indexed, at some 700 bytes each."""


class Find(NamedTuple):
    """The last tokens, as many as `length`, stood before `end` too; `share` is how often such a find was right."""

    length: int
    end: int
    share: float


class Shares:
    """How often matches of each length were right in earlier texts."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(LENGTHS, 4.0 * GUESS_WEIGHT)
        self._right = {length: 4 * GUESS_WEIGHT * guess for length, guess in FIRST_GUESSES.items()}

    def learn(self, length: int, is_right: bool) -> None:
        self._found[length] = KEPT * self._found[length] + 1
        self._right[length] = KEPT * self._right[length] + is_right

    def __getitem__(self, length: int) -> float:
        return self._right[length] / self._found[length]


class Ngrams:
    """The n-grams of a text that only grows, where each ended last, and whether the text went on as it did there."""

    def __init__(self, others: Shares) -> None:
        """`others` has the statistics of similar texts and is updated."""
        self._others = others
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._last: Find | None = None
        self._found, self._right = Counter[int](), Counter[int]()

    def find(self, token_ids: Items[int], stop: int) -> Find | None:
        """The longest n-gram that ends at `stop` and occurred before."""
        self._learn(token_ids, stop)
        for end in range(max(self._num_indexed, stop - MAX_LOOKBACK), stop):
            for length in LENGTHS:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_indexed, self._last = stop, None
        for length in LENGTHS:
            if length < stop and (known := self._ends.get(tuple(token_ids[stop - length : stop]))):
                self._last = Find(length, known, self._share(length))
                break
        return self._last

    def _share(self, length: int) -> float:
        """Hit rate in this text, with the other texts' rate as prior."""
        right = self._right[length] + GUESS_WEIGHT * self._others[length]
        return right / (self._found[length] + GUESS_WEIGHT)

    def _learn(self, token_ids: Items[int], stop: int) -> None:
        """Update the statistics: whether the last match was right is visible without drafting it."""
        if self._last is not None and stop > self._num_indexed:
            length, end, _ = self._last
            is_right = token_ids[end] == token_ids[self._num_indexed]
            self._found[length] += 1
            self._right[length] += is_right
            self._others.learn(length, is_right)


def continued(token_ids: Items[int], end: int, stop: int, number: int) -> list[int]:
    """The `number` tokens after `end`; past `stop` the text continues cyclically."""
    return [token_ids[end + ahead % (stop - end)] for ahead in range(number)]
