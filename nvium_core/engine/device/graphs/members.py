"""Sequences that have a row each in passes, and what does not change of them from one pass to the next.

Shapes: R rows.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nvium_core.engine.device.paged_cache import Integers
from nvium_core.engine.schedule.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Members:
    """In the rows' order. Their *age* counts passes: a row's position is that of `start_R` and the age.

    `pages`: the lists they had at first; an admission gives a sequence a new one, which then only grows.
    """

    sequences: list[Sequence]
    pages: list[list[int]]
    start_R: Integers
    page_size: int

    @classmethod
    def of(cls, sequences: list[Sequence], positions: list[int], page_size: int) -> "Members":
        return cls(sequences, [sequence.pages for sequence in sequences], np.array(positions), page_size)

    def part(self, rows: Items[int]) -> "Members":
        sequences, pages = [self.sequences[row] for row in rows], [self.pages[row] for row in rows]
        return Members(sequences, pages, self.start_R[rows], self.page_size)

    @cached_property
    def rows(self) -> Integers:
        """Their numbers, [R]."""
        return np.arange(len(self.sequences))

    @cached_property
    def are_plain(self) -> bool:
        return False not in [sequence.is_plain for sequence in self.sequences]

    @cached_property
    def are_ranked(self) -> bool:
        """A token is drawn in the pass, from ranked tokens."""
        return True in [sequence.is_plain and sequence.draw.is_ranked for sequence in self.sequences]

    @cached_property
    def ends(self) -> list[int]:
        """The age at which a row emits no token, as it has the last one there may be."""
        starts = self.start_R.tolist()
        return [sequence.max_length - 1 - start for sequence, start in zip(self.sequences, starts, strict=True)]

    @cached_property
    def first_end(self) -> int:
        return min(self.ends)

    @cached_property
    def longest(self) -> int:
        """Positions of the longest, at first."""
        return int(self.start_R.max()) + 1

    def tokens(self, age: int) -> list[int]:
        """Of the rows; only where they are known here."""
        position_R = (self.start_R + age).tolist()
        return [sequence.token_ids[t] for sequence, t in zip(self.sequences, position_R, strict=True)]

    def new_pages(self, age: int) -> list[tuple[int, int]]:
        """(row, page) of the positions that are the first of their page."""
        rows = self._rows_by_place.get(-age % self.page_size)
        return [(row, (int(self.start_R[row]) + age) // self.page_size) for row in rows] if rows else []

    def have_room(self, age: int) -> bool:
        """Whether they have pages for their positions, those before having theirs."""
        return False not in [page < len(self.pages[row]) for row, page in self.new_pages(age)]

    @cached_property
    def _rows_by_place(self) -> dict[int, list[int]]:
        """By where in its page a row is at first."""
        rows: dict[int, list[int]] = defaultdict(list)
        for row, start in enumerate(self.start_R.tolist()):
            rows[start % self.page_size].append(row)
        return dict(rows)
