"""Measures while serving which of several candidates, such as schedules, emits the most tokens per second. Torch-free.

There is one tuner for each size: 1, 2 to 3, 4 to 7, … running sequences. In a round the candidates take turns in short
windows, in the order A B B A. A candidate beats the first if the mean log of their speed ratio exceeds two standard
errors. The winner then runs alone, so long that the overhead of measuring is negligible. The mean is a moving average,
so old rounds lose weight.

Before the first round the expected winner runs: that of the next measured size, or a guess. Until the first decision,
the best so far runs between the rounds, so that measuring costs the first users of a server little.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Generic, TypeVar

WINDOW_TOKENS = 16  # length of a window in tokens per sequence
MIN_ROUNDS = 4  # rounds before the first decision
AVERAGED_ROUNDS = 24  # length of the moving average in rounds
MIN_STANDARD_ERRORS = 2.0  # a winner's minimum lead, in standard errors
MAX_OVERHEAD, MAX_FIRST_OVERHEAD = 0.005, 0.02  # share of throughput that measuring may cost: later, and at first
PAUSE_TOKENS, MAX_PAUSE_TOKENS = 640, 16_384
"""Pause between rounds, in tokens per sequence: before the first decision at most `PAUSE_TOKENS`, then at least."""

Candidate = TypeVar("Candidate")


class SizeTuner(Generic[Candidate]):
    """The tuner of one size, that is a range of numbers of running sequences. `winner`: the expected one."""

    def __init__(self, candidates: Items[Candidate], winner: int, first_pause: int) -> None:
        self.candidates = candidates
        self.num_rounds = 0
        self._means = [0.0] * len(candidates)
        """Mean of log(tokens per second / the first candidate's tokens per second)."""
        self._variances = [0.0] * len(candidates)
        self.winner = winner
        """Index of the candidate that runs between rounds."""
        self._turns = [*range(len(candidates)), *reversed(range(len(candidates)))]
        self._turn = 0
        self._window = 0.0, 0.0
        """Tokens and seconds of this window so far."""
        self.is_settling = True
        """Whether another candidate or size may have run last. Then the next Step does not count."""
        self._rates: list[list[float]] = [[] for _ in candidates]
        self._first_pause = first_pause
        self._pause_tokens = float(first_pause)

    @property
    def has_decided(self) -> bool:
        return self.num_rounds >= MIN_ROUNDS

    @property
    def current(self) -> int:
        return self.winner if self._pause_tokens > 0 or len(self.candidates) == 1 else self._turns[self._turn]

    @property
    def ratio(self) -> float:
        """Speedup of the winner over the first candidate; nan before the first round."""
        return math.exp(self._means[self.winner]) if self.num_rounds else math.nan

    def observe(self, tokens: float, seconds: float) -> None:
        """Record a Step of the current candidate, with its tokens per sequence."""
        if self._pause_tokens > 0:
            self._pause_tokens -= tokens
        elif self.is_settling:
            self.is_settling = False
        else:
            self._window = self._window[0] + tokens, self._window[1] + seconds
            if self._window[0] >= WINDOW_TOKENS:
                self._end_turn(*self._window)

    def _end_turn(self, tokens: float, seconds: float) -> None:
        self._rates[self._turns[self._turn]].append(math.log(tokens / max(seconds, 1e-9)))
        self._turn, self._window, self.is_settling = self._turn + 1, (0.0, 0.0), True
        if self._turn == len(self._turns):
            self._end_round([sum(rates) / len(rates) for rates in self._rates])

    def _end_round(self, rates: list[float]) -> None:
        self._turn, self._rates = 0, [[] for _ in self.candidates]
        self.num_rounds += 1
        rounds = min(self.num_rounds, AVERAGED_ROUNDS)
        for index, rate in enumerate(rates):
            change = rate - rates[0] - self._means[index]
            self._means[index] += change / rounds
            self._variances[index] = (1 - 1 / rounds) * (self._variances[index] + change**2 / rounds)
        if self.has_decided:
            self._decide([MIN_STANDARD_ERRORS * math.sqrt(variance / (rounds - 1)) for variance in self._variances])
        else:
            self.winner = self._means.index(max(self._means))
            self._pause_tokens = min(self._pause(MAX_FIRST_OVERHEAD), self._first_pause)

    def _decide(self, significant: list[float]) -> None:
        """Choose the winner and the pause. A candidate's mean is significant if its absolute value exceeds a bound."""
        faster = [index for index, mean in enumerate(self._means) if mean > significant[index]]
        self.winner = max(faster, key=self._means.__getitem__, default=0)
        is_sure = all(abs(mean) > bound for mean, bound in zip(self._means[1:], significant[1:], strict=True))
        self._pause_tokens = min(
            max(self._pause(MAX_OVERHEAD if is_sure else math.inf), PAUSE_TOKENS), MAX_PAUSE_TOKENS
        )

    def _pause(self, max_overhead: float) -> float:
        """Return the tokens of the winner after which a round costs at most this share of throughput."""
        lost = [math.exp(max(0.0, self._means[self.winner] - mean)) - 1 for mean in self._means]
        return 2 * WINDOW_TOKENS * sum(lost) / max_overhead


class Tuner(Generic[Candidate]):
    """Chooses the fastest candidate for each number of running sequences; the first one is the baseline.

    guess: number of running sequences → index of the candidate that is probably the fastest.
    first_pause: tokens per sequence before the first round; 0 decides as soon as possible, such as for a benchmark.
    """

    def __init__(
        self,
        candidates: Items[Candidate],
        guess: Callable[[int], int] = lambda num_sequences: 0,
        first_pause: int = PAUSE_TOKENS,
    ) -> None:
        self._candidates = candidates
        self._guess, self._first_pause = guess, first_pause
        self._by_size: dict[int, SizeTuner[Candidate]] = {}
        self._last_size = 0

    def choose(self, num_sequences: int) -> Candidate:
        size = num_sequences.bit_length()
        if size != self._last_size and self._last_size in self._by_size:
            self._by_size[self._last_size].is_settling = True
        self._last_size = size
        if size not in self._by_size:
            near = (self._by_size.get(neighbour) for neighbour in (size - 1, size + 1))
            measured = (tuner.winner for tuner in near if tuner and tuner.has_decided)
            winner = next(measured, self._guess(num_sequences))
            self._by_size[size] = SizeTuner(self._candidates, winner, self._first_pause)
        return self._candidates[self._by_size[size].current]

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a Step of the candidate that `choose` returned. `num_tokens` is the total of all sequences."""
        if self._last_size == num_sequences.bit_length():
            self._by_size[self._last_size].observe(num_tokens / num_sequences, seconds)

    @property
    def ratio(self) -> float:
        """Speedup of the winner over the baseline at the last number of sequences; nan until measured."""
        return self._by_size[self._last_size].ratio if self._last_size in self._by_size else math.nan
