"""Measures while serving which of several ways emits the most tokens per second. Torch-free.

For each number of sequences, in powers of two, the ways take turns in short windows, forth and back (A B B A). A way
wins over the first if its mean log ratio exceeds two standard errors. The winner then runs alone long enough to make
the overhead of measuring negligible. The mean is a moving average, so old rounds lose weight.
"""

import math
from collections.abc import Sequence as Items
from typing import Any, Generic, TypeVar

WINDOW_TOKENS = 16
"""Tokens per sequence in a window, without its first Step."""

MIN_ROUNDS = 4
"""Rounds before the first decision, without pauses."""

MEMORY = 24
"""Length of the moving average in rounds."""

CONFIDENCE = 2.0
"""Standard errors by which a way must win."""

MAX_COST = 0.005
"""Maximum overhead of measuring, as a share of all tokens."""

SHORTEST_REST, LONGEST_REST = 256, 16_384
"""Bounds on the pause between rounds, in tokens per sequence."""

Way = TypeVar("Way")


class Heat(Generic[Way]):
    """The race for one number of sequences."""

    def __init__(self, ways: Items[Way]) -> None:
        self.ways = ways
        self.num_rounds = 0
        self._means = [0.0] * len(ways)
        """Mean of log(tokens per second / the first way's tokens per second)."""
        self._variances = [0.0] * len(ways)
        self.winner = 0
        self._turns = [*range(len(ways)), *reversed(range(len(ways)))]
        self._turn = 0
        self._window: tuple[float, float] | None = None
        """Tokens and seconds of this window so far; None before its first Step."""
        self._rates: list[list[float]] = [[] for _ in ways]
        self._tokens_to_rest = 0.0

    @property
    def current(self) -> int:
        return self.winner if self._tokens_to_rest > 0 or len(self.ways) == 1 else self._turns[self._turn]

    @property
    def ratio(self) -> float:
        """Speedup of the winner over the first way; nan before the first round."""
        return math.exp(self._means[self.winner]) if self.num_rounds else math.nan

    def observe(self, tokens: float, seconds: float) -> None:
        """Record a Step of the current way, with its tokens per sequence."""
        if self._tokens_to_rest > 0:
            self._tokens_to_rest -= tokens
        elif self._window is None:
            self._window = 0.0, 0.0
        else:
            self._window = self._window[0] + tokens, self._window[1] + seconds
            if self._window[0] >= WINDOW_TOKENS:
                self._end_turn(*self._window)

    def interrupt(self) -> None:
        """Restart the window after Steps of another size. Finished windows still count."""
        self._window = None

    @property
    def is_sure(self) -> bool:
        """Whether every way is significantly faster or slower than the first."""
        errors = self._errors()
        return bool(errors) and all(abs(self._means[way]) > CONFIDENCE * errors[way] for way in range(1, len(errors)))

    def remember(self, means: Items[float], variances: Items[float]) -> None:
        """Start from a saved measurement, which weighs as much as `MIN_ROUNDS` rounds."""
        self._means, self._variances, self.num_rounds = list(means), list(variances), MIN_ROUNDS
        self._decide()
        self._tokens_to_rest = SHORTEST_REST

    def as_dict(self) -> dict[str, list[float]]:
        return {"means": self._means, "variances": self._variances}

    def _end_turn(self, tokens: float, seconds: float) -> None:
        self._rates[self._turns[self._turn]].append(math.log(tokens / max(seconds, 1e-9)))
        self._turn, self._window = self._turn + 1, None
        if self._turn == len(self._turns):
            self._end_round([sum(rates) / len(rates) for rates in self._rates])

    def _end_round(self, rates: list[float]) -> None:
        self._turn, self._rates = 0, [[] for _ in self.ways]
        self.num_rounds += 1
        weight = 1 / min(self.num_rounds, MEMORY)
        for way, rate in enumerate(rates):
            change = rate - rates[0] - self._means[way]
            self._means[way] += weight * change
            self._variances[way] = (1 - weight) * (self._variances[way] + weight * change**2)
        self._decide()
        if self.num_rounds >= MIN_ROUNDS:
            lost = [math.exp(max(0.0, self._means[self.winner] - mean)) - 1 for mean in self._means]
            rest = 2 * WINDOW_TOKENS * sum(lost) / MAX_COST if self.is_sure else 0.0
            self._tokens_to_rest = min(max(rest, SHORTEST_REST), LONGEST_REST)

    def _decide(self) -> None:
        if errors := self._errors():
            sure = [way for way in range(1, len(self.ways)) if self._means[way] > CONFIDENCE * errors[way]]
            self.winner = max(sure, key=self._means.__getitem__, default=0)

    def _errors(self) -> list[float]:
        """Return the standard errors of the means; empty before `MIN_ROUNDS` rounds."""
        rounds = min(self.num_rounds, MEMORY)
        return [math.sqrt(variance / (rounds - 1)) for variance in self._variances] if rounds >= MIN_ROUNDS else []


class Race(Generic[Way]):
    """A race of several ways; the first one is the baseline."""

    def __init__(self, ways: Items[Way]) -> None:
        self._ways = ways
        self._heats: dict[int, Heat[Way]] = {}
        self._last = 0

    @property
    def is_open(self) -> bool:
        """Whether there is more than one way."""
        return len(self._ways) > 1

    def choose(self, num_sequences: int) -> Way:
        size = num_sequences.bit_length()
        if size != self._last and self._last in self._heats:
            self._heats[self._last].interrupt()
        self._last = size
        return self._ways[self._heat(size).current]

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a Step of the way that `choose` returned, with its total tokens."""
        if self._last == num_sequences.bit_length():
            self._heat(self._last).observe(num_tokens / num_sequences, seconds)

    @property
    def ratio(self) -> float:
        """Speedup over the baseline at the last number of sequences; nan until measured."""
        return self._heats[self._last].ratio if self._last in self._heats else math.nan

    def winner(self, num_sequences: int) -> Way:
        return self._ways[self._heat(num_sequences.bit_length()).winner]

    def is_decided(self, num_sequences: int) -> bool:
        return self._heat(num_sequences.bit_length()).num_rounds >= MIN_ROUNDS

    def as_dict(self) -> dict[str, Any]:
        """Return the significant measurements, for JSON."""
        return {str(size): heat.as_dict() for size, heat in self._heats.items() if heat.is_sure}

    def remember(self, saved: dict[str, Any]) -> None:
        """Start from the result of `as_dict`. Raise `ValueError`, `KeyError` or `TypeError` if it is damaged."""
        for size, heat in saved.items():
            means, variances = ([float(x) for x in heat[name]] for name in ("means", "variances"))
            if len(means) != len(self._ways) or len(variances) != len(self._ways):
                raise ValueError("the saved race has other ways")
            self._heat(int(size)).remember(means, variances)

    def _heat(self, size: int) -> Heat[Way]:
        if size not in self._heats:
            self._heats[size] = Heat(self._ways)
        return self._heats[size]
