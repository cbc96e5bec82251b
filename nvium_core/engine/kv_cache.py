"""Who owns which page of the key/value cache. Plain accounting; the tensors are the runner's.

A page holds `page_size` consecutive positions of one sequence, for all layers. Position t of a sequence lives in slot
pages[t // page_size] · page_size + t % page_size.
"""

from collections.abc import Iterable

from nvium_core.engine.sequence import Sequence


def slots(sequence: Sequence, positions: range, page_size: int) -> list[int]:
    """Where these positions live."""
    return [sequence.pages[t // page_size] * page_size + t % page_size for t in positions]


class PagePool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of pages in use."""
        return 1 - self.num_free / self.num_pages

    def num_pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def grow(self, sequence: Sequence, num_positions: int) -> bool:
        """Give the sequence pages for its first `num_positions`; False, and nothing done, if too few are free."""
        missing = self.num_pages_for(num_positions) - len(sequence.pages)
        if missing > self.num_free:
            return False
        sequence.pages.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, sequence: Sequence) -> None:
        """Take all pages back."""
        self._free.extend(reversed(sequence.pages))
        sequence.pages.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every page is either free or owned by exactly one of the sequences."""
        owned = [page for sequence in sequences for page in sequence.pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "a page is leaked or owned twice"
