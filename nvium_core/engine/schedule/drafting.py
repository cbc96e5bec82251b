"""Drafts tokens by prompt lookup (`ngrams`), if the last exit is likely to accept them. Torch-free.

A tuner measures which limit on the number of draft tokens gives the most tokens per second.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.ngrams import HitRates, continuation
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.tuner import Tuner

TUNED_LIMITS = 0, 2, 6  # the limits on draft tokens per sequence that the tuner compares
MIN_ACCEPTANCE = 0.3  # minimum estimated probability that all draft tokens are accepted


class Drafting:
    """Chooses drafts of at most `max_drafts` tokens. 0 disables drafts; None lets a tuner choose the limit."""

    def __init__(self, max_drafts: int | None = None) -> None:
        self.is_off = max_drafts == 0
        self.tuner = Tuner(TUNED_LIMITS if max_drafts is None else (max_drafts,))
        self._hit_rates = {False: HitRates(), True: HitRates()}
        """Hit rates of requests at temperature 0 (True) and of all other requests (False)."""
        self.num_drafted = self.num_accepted = 0

    def drafts_for(self, sequence: Sequence, num_running: int) -> Items[int]:
        """Return draft tokens: the tokens that followed an earlier occurrence of the sequence's last tokens."""
        if self.is_off or not sequence.may_draft or sequence.num_drafts:
            return ()
        match = sequence.find_match(self._hit_rates[sequence.params.temperature == 0])
        number = self.tuner.choose(num_running) if match else 0
        while match and number and match.hit_rate**number < MIN_ACCEPTANCE:
            number -= 1
        return continuation(sequence.token_ids, match.end, sequence.num_tokens, number) if match and number else ()

    def record(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
