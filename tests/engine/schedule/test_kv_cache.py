"""Page accounting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.schedule.kv_cache import PagePool, slots
from tests.engine.schedule.test_sequence import sequence_of


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
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([sequence, sequence])
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([])


def test_a_page_that_is_lost_or_misnamed_is_found() -> None:
    pool = PagePool(num_pages=3, page_size=3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="a page is lost"):
        pool.check_integrity([])
    pool, sequence = PagePool(num_pages=3, page_size=3), sequence_of(7, 1)
    pool.grow(sequence, 7)
    sequence.filled = [7]
    pool.publish(sequence, since=0)
    pool.check_integrity([sequence])
    pool._name_of.popitem()
    with pytest.raises(AssertionError, match="wrong name"):
        pool.check_integrity([sequence])


@given(st.integers(1, 9), st.integers(0, 60))
def test_pages_are_counted_up_and_full_pages_down(page_size: int, num_positions: int) -> None:
    pool = PagePool(num_pages=1, page_size=page_size)
    num_pages, num_rows = pool.num_pages_for(num_positions), pool.num_rows_in_full_pages(num_positions)
    assert (num_pages - 1) * page_size < num_positions <= num_pages * page_size
    assert num_rows <= num_positions < num_rows + page_size
    assert num_rows % page_size == 0


@given(st.integers(1, 5), st.integers(1, 20))
def test_every_position_has_a_slot_of_its_own_in_its_page(page_size: int, num_tokens: int) -> None:
    pool, sequence = PagePool(num_pages=30, page_size=page_size), sequence_of(num_tokens, 1)
    pool.grow(sequence, num_tokens)
    places = slots(sequence, range(num_tokens), page_size)
    assert len({*places}) == num_tokens
    assert [place // page_size for place in places] == [sequence.pages[t // page_size] for t in range(num_tokens)]
    assert slots(sequence, range(num_tokens // 2, num_tokens), page_size) == places[num_tokens // 2 :]
