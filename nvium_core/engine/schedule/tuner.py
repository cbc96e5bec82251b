"""Measures while serving which of several candidates, such as schedules, emits the most tokens per second. Torch-free.

There is one tuner for each size: 1, 2 to 3, 4 to 7, … running sequences. In a round the candidates take turns in short
windows, in the order A B B A. A candidate beats the first if the mean log of their speed ratio exceeds two standard
errors. The winner then runs alone, so long that the overhead of measuring is negligible. The mean is a moving average,
so old rounds lose weight.
"""

import math
from collections import defaultdict
from collections.abc import Sequence as Items
from typing import Generic, TypeVar

WINDOW_TOKENS = 16  # length of a window in tokens per sequence; its first Step does not count
MIN_ROUNDS = 4  # rounds before the first decision; there are no pauses between them
AVERAGED_ROUNDS = 24  # length of the moving average in rounds
MIN_STANDARD_ERRORS = 2.0  # a winner's minimum lead, in standard errors
MAX_OVERHEAD = 0.005  # share of throughput that measuring may cost
MIN_PAUSE_TOKENS, MAX_PAUSE_TOKENS = 256, 16_384  # pause between rounds, in tokens per sequence

Candidate = TypeVar("Candidate")


class SizeTuner(Generic[Candidate]):
    """The tuner of one size, that is a range of numbers of running sequences."""

    def __init__(self, candidates: Items[Candidate]) -> None:
        self.candidates = candidates
        self.num_rounds = 0
        self._means = [0.0] * len(candidates)
        """Mean of log(tokens per second / the first candidate's tokens per second)."""
        self._variances = [0.0] * len(candidates)
        self.winner = 0
        """Index of the candidate that runs between rounds."""
        self._turns = [*range(len(candidates)), *reversed(range(len(candidates)))]
        self._turn = 0
        self._window: tuple[float, float] | None = None
        """Tokens and seconds of this window so far; None before its first Step."""
        self._rates: list[list[float]] = [[] for _ in candidates]
        self._pause_tokens = 0.0

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
        elif self._window is None:
            self._window = 0.0, 0.0
        else:
            self._window = self._window[0] + tokens, self._window[1] + seconds
            if self._window[0] >= WINDOW_TOKENS:
                self._end_turn(*self._window)

    def interrupt(self) -> None:
        """Restart the window, because Steps of another size came in between. Finished windows still count."""
        self._window = None

    def _end_turn(self, tokens: float, seconds: float) -> None:
        self._rates[self._turns[self._turn]].append(math.log(tokens / max(seconds, 1e-9)))
        self._turn, self._window = self._turn + 1, None
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
        if rounds >= MIN_ROUNDS:
            self._decide([MIN_STANDARD_ERRORS * math.sqrt(variance / (rounds - 1)) for variance in self._variances])

    def _decide(self, significant: list[float]) -> None:
        """Choose the winner and the pause. A candidate's mean is significant if its absolute value exceeds a bound."""
        faster = [index for index, mean in enumerate(self._means) if mean > significant[index]]
        self.winner = max(faster, key=self._means.__getitem__, default=0)
        is_sure = all(abs(mean) > bound for mean, bound in zip(self._means[1:], significant[1:], strict=True))
        lost = [math.exp(max(0.0, self._means[self.winner] - mean)) - 1 for mean in self._means]
        pause = 2 * WINDOW_TOKENS * sum(lost) / MAX_OVERHEAD if is_sure else 0.0
        self._pause_tokens = min(max(pause, MIN_PAUSE_TOKENS), MAX_PAUSE_TOKENS)


class Tuner(Generic[Candidate]):
    """Chooses the fastest candidate for each number of running sequences; the first one is the baseline."""

    def __init__(self, candidates: Items[Candidate]) -> None:
        self._candidates = candidates
        self._by_size: defaultdict[int, SizeTuner[Candidate]] = defaultdict(lambda: SizeTuner(candidates))
        self._last_size = 0

    @property
    def is_open(self) -> bool:
        return len(self._candidates) > 1

    def choose(self, num_sequences: int) -> Candidate:
        size = num_sequences.bit_length()
        if size != self._last_size and self._last_size in self._by_size:
            self._by_size[self._last_size].interrupt()
        self._last_size = size
        return self._candidates[self._by_size[size].current]

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a Step of the candidate that `choose` returned. `num_tokens` is the total of all sequences."""
        if self._last_size == num_sequences.bit_length():
            self._by_size[self._last_size].observe(num_tokens / num_sequences, seconds)

    @property
    def ratio(self) -> float:
        """Speedup of the winner over the baseline at the last number of sequences; nan until measured."""
        return self._by_size[self._last_size].ratio if self._last_size in self._by_size else math.nan
