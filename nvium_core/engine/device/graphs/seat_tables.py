"""Page tables of running sequences, seat by seat: renewed when a sequence has more pages, not with every Step.

Shapes: S seats, R sequences, W pages.
"""

from collections.abc import Sequence as Items

import numpy as np

from nvium_core.engine.device.paged_cache import Integers
from nvium_core.engine.schedule.sequence import Sequence


class SeatTables:
    def __init__(self, max_pages: int, null_page: int) -> None:
        """`null_page` stands behind a sequence's last."""
        self._null_page = null_page
        self._table_SW = np.full((1, max_pages), null_page)
        self._known: list[tuple[list[int], int]] = [([], 0)]
        """Each seat's pages, and how many of them are in its table. An admission gives a sequence a new list of pages,
        which then only grows."""

    def of(self, sequences: Items[Sequence], width: int) -> Integers:
        """[R, W]."""
        seats = [self._seat(sequence) for sequence in sequences]
        return self._table_SW[seats, :width]

    def _seat(self, sequence: Sequence) -> int:
        seat, pages = sequence.seat or 0, sequence.pages
        while seat >= len(self._known):
            self._make_room()
        known, count = self._known[seat]
        if known is not pages or count != len(pages):
            self._known[seat] = pages, len(pages)
            self._table_SW[seat, : len(pages)] = pages
            self._table_SW[seat, len(pages) :] = self._null_page
        return seat

    def _make_room(self) -> None:
        """For twice as many seats."""
        self._table_SW = np.concatenate([self._table_SW, np.full_like(self._table_SW, self._null_page)])
        self._known += [([], 0)] * len(self._known)
