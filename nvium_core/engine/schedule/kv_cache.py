"""Ownership of the key/value cache's pages. The tensors are in `PagedCache`.

A page stores `page_size` consecutive positions of a sequence, for all layers. Position t of a sequence is in slot
pages[t // page_size] · page_size + t % page_size. A page is *complete* if every block has computed all its positions.
A page is in one of four states:

    fresh     it was never used. On a CPU it takes no memory yet
    free      it has no owner, and its content is not needed
    owned     by one sequence or, if it is complete, by all sequences that share its prefix
    kept      it is complete but has no owner: a later sequence with this prefix can own it, until it is evicted

To save memory, the pool evicts kept pages before it uses more than `num_preferred` pages. When a sequence misses a page
that was evicted for this reason, `num_preferred` rises.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import takewhile

from nvium_core.engine.schedule.sequence import Sequence


class PagePool:
    """The pages of a cache. `keeps_pages` False disables prefix caching: pages are neither kept nor shared."""

    def __init__(
        self, num_pages: int, page_size: int, *, num_preferred: int | None = None, keeps_pages: bool = True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.keeps_pages = keeps_pages
        self.num_rows_found = 0
        """Total rows that sequences have taken from the prefix cache."""
        self.num_preferred = num_pages if num_preferred is None else min(num_preferred, num_pages)
        """Pages to use before kept ones are evicted."""
        self.num_used = 0
        """Pages that are not fresh: those before page `num_used`."""
        self._free: list[int] = []
        self._kept: dict[int, None] = {}  # in the order of their last use
        self._evicted: dict[bytes, None] = {}  # digests of pages that were evicted although others were fresh
        self._num_owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return self.num_pages - self.num_used + len(self._free) + len(self._kept)

    @property
    def usage(self) -> float:
        return 1 - self.num_free / self.num_pages

    def num_pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def grow(self, sequence: Sequence, num_positions: int) -> bool:
        """Allocate pages for the sequence's first `num_positions`. Return False if too few are available."""
        missing = self.num_pages_for(num_positions) - len(sequence.pages)
        if missing > self.num_free:
            return False
        if missing > 0:
            sequence.pages.extend(sorted(self._allocate() for _ in range(missing)))  # memory is read faster in order
        return True

    def release(self, sequence: Sequence) -> None:
        """Release all pages. A sequence's last page is the first to be evicted, because `match` needs earlier pages."""
        for page in reversed(sequence.pages):
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if page in self._digest_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)
        sequence.pages.clear()

    def register(self, sequence: Sequence, since: int) -> None:
        """Register complete pages from row `since` on, so that `match` finds them. Skip content already registered."""
        if not self.keeps_pages:
            return
        first, complete = since // self.page_size, sequence.filled[-1] // self.page_size
        digests = self._digests(sequence, complete)
        for digest, page in zip(digests[first:], sequence.pages[first:complete], strict=True):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def invalidate(self, sequence: Sequence) -> None:
        """Unregister the sequence's pages, whose content may be corrupt."""
        for page in sequence.pages:
            if page in self._digest_of:
                del self._page_of[self._digest_of.pop(page)]

    def match(self, sequence: Sequence) -> list[int]:
        """Return the registered pages that have the same content as the sequence's first pages."""
        digests = self._digests(sequence, sequence.num_cacheable_rows // self.page_size)
        found = [self._page_of[digest] for digest in takewhile(self._page_of.__contains__, digests)]
        missed = [digest for digest in digests[len(found) :] if digest in self._evicted]
        for digest in missed:
            del self._evicted[digest]
        self.num_preferred = min(self.num_preferred + len(missed), self.num_pages)
        return found

    def num_free_without(self, pages: Iterable[int]) -> int:
        """Return how many pages would be available if these pages had owners."""
        return self.num_free - sum(page in self._kept for page in pages)

    def acquire(self, sequence: Sequence, pages: list[int]) -> None:
        """Give the pages that `match` returned to a sequence that has no pages."""
        for page in pages:
            self._kept.pop(page, None)
            self._num_owners[page] += 1
        sequence.pages = list(pages)
        sequence.start_at(len(pages) * self.page_size)
        self.num_rows_found += len(pages) * self.page_size

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every page is fresh, free, kept, or owned by exactly the sequences that list it."""
        owners = Counter(page for sequence in sequences for page in sequence.pages)
        counted = {page: count for page, count in enumerate(self._num_owners) if count}
        assert counted == owners, "a page is leaked, or its owner count is wrong"
        assert sorted([*owners, *self._free, *self._kept]) == list(range(self.num_used)), "a page is lost"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "a page has a wrong digest"
        assert self._kept.keys() <= self._digest_of.keys() and not self._digest_of.keys() & {*self._free}

    def _allocate(self) -> int:
        """Allocate a page for one owner: a free one, a fresh one, or the least recently used kept one."""
        if self._free:
            page = self._free.pop()
        elif self._kept and self.num_used >= self.num_preferred:
            page = self._evict()
        else:
            page, self.num_used = self.num_used, self.num_used + 1
        self._num_owners[page] = 1
        return page

    def _evict(self) -> int:
        page = next(iter(self._kept))
        digest = self._digest_of.pop(page)
        del self._kept[page], self._page_of[digest]
        if self.num_used < self.num_pages:
            self._evicted[digest] = None
            if len(self._evicted) > self.num_pages:  # it would not be kept in the whole cache either
                del self._evicted[next(iter(self._evicted))]
        return page

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """Return digests of the first pages. A digest covers the page's tokens, all earlier tokens and the salt."""
        digests, num_bytes = sequence.page_digests, 8 * self.page_size
        missing = sequence.token_ids[len(digests) * self.page_size : num_pages * self.page_size]
        content = array("q", missing).tobytes()
        digest = digests[-1] if digests else sequence.cache_salt.encode()
        for start in range(0, len(content), num_bytes):
            digest = blake2b(digest + content[start : start + num_bytes], digest_size=32).digest()
            digests.append(digest)
        return digests[:num_pages]
