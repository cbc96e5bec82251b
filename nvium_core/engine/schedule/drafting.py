"""Drafts for the last exit, copied from earlier text (`ngrams`) while they are likely enough. Torch-free.

A race decides how many draft tokens in a row give the most tokens per second.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.ngrams import HitRates, copied
from nvium_core.engine.schedule.race import Race
from nvium_core.engine.schedule.sequence import Sequence

NUMBERS = 0, 2, 6
"""Maximum numbers of draft tokens that race."""

MIN_ACCEPTANCE = 0.3
"""Minimum estimated probability that all drafts are accepted."""


class Drafting:
    """Chooses drafts. `most` fixes the maximum number in a row (0: no drafts); None lets a race decide."""

    def __init__(self, most: int | None = None) -> None:
        self.is_off = most == 0
        self._race = Race(NUMBERS if most is None else (most,))
        self._hit_rates = {False: HitRates(), True: HitRates()}
        """Acceptance statistics, separately for temperature 0 (True)."""
        self.num_drafted = self.num_accepted = 0

    def drafts_for(self, sequence: Sequence, num_running: int) -> Items[int]:
        """Return the tokens that followed an earlier occurrence of the last tokens."""
        if self.is_off or not sequence.may_draft or sequence.num_drafts:
            return ()
        match = sequence.find_match(self._hit_rates[sequence.params.temperature == 0])
        number = self._race.choose(num_running) if match else 0
        while match and number and match.hit_rate**number < MIN_ACCEPTANCE:
            number -= 1
        return copied(sequence.token_ids, match.end, sequence.num_tokens, number) if match and number else ()

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self._race.observe(num_sequences, num_tokens, seconds)
