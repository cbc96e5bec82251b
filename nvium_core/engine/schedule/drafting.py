"""How many tokens are copied from the text as drafts for the last exit: raced, as tokens per second. Torch-free.

A draft is copied where the last tokens stood before (`ngrams`), as long as it is likely enough to be right.
"""

from collections.abc import Sequence as Items

from nvium_core.engine.schedule.ngrams import Shares, continued
from nvium_core.engine.schedule.race import Race
from nvium_core.engine.schedule.sequence import Sequence

NUMBERS = 0, 2, 6
"""Drafts in a row at most, which race."""

LEAST_SHARE = 0.3
"""Probability of all drafts being right below which none is copied."""


class Drafting:
    """`most` fixes the number of drafts in a row; None lets a race decide, 0 is none."""

    def __init__(self, most: int | None = None) -> None:
        self.is_off = most == 0
        self._race = Race(NUMBERS if most is None else (most,))
        self._shares = {False: Shares(), True: Shares()}
        """Where tokens are drawn, and where they are likeliest ones."""
        self.num_drafted = self.num_accepted = 0
        """In all so far."""

    def drafts_for(self, sequence: Sequence, num_running: int) -> Items[int]:
        """Tokens that followed an earlier occurrence of the last tokens."""
        if self.is_off or not sequence.may_draft or sequence.num_drafts:
            return ()
        find = sequence.look_up(self._shares[sequence.params.temperature == 0])
        number = self._race.choose(num_running) if find else 0
        while find and number and find.share**number < LEAST_SHARE:
            number -= 1
        return continued(sequence.token_ids, find.end, sequence.num_tokens, number) if find and number else ()

    def verified(self, num_drafted: int, num_right: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_right

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self._race.observe(num_sequences, num_tokens, seconds)
