"""Page accounting."""

import pytest

from nvium_core.engine.kv_cache import PagePool
from tests.engine.test_sequence import sequence_of


def test_pages_are_given_as_positions_need_them_and_come_back() -> None:
    pool, sequence = PagePool(num_pages=4, page_size=3), sequence_of(9, 1)
    assert pool.grow(sequence, 4)
    assert len(sequence.pages) == 2
    assert pool.grow(sequence, 6)
    assert len(sequence.pages) == 2
    assert pool.usage == 0.5
    pool.check_integrity([sequence])
    pool.release(sequence)
    assert pool.num_free == 4
    pool.check_integrity([sequence])


def test_nothing_is_given_when_there_is_too_little() -> None:
    pool, greedy, late = PagePool(num_pages=2, page_size=3), sequence_of(9, 1), sequence_of(9, 1)
    assert pool.grow(greedy, 6)
    assert not pool.grow(late, 1)
    assert late.pages == []


def test_a_page_owned_twice_or_by_nobody_is_found() -> None:
    pool, sequence = PagePool(num_pages=2, page_size=3), sequence_of(9, 1)
    pool.grow(sequence, 3)
    with pytest.raises(AssertionError, match="leaked or owned twice"):
        pool.check_integrity([sequence, sequence])
    with pytest.raises(AssertionError, match="leaked or owned twice"):
        pool.check_integrity([])
