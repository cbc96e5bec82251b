import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.schedule.kv_cache import PagePool, slots
from tests.engine.schedule.test_sequence import sequence_of


def test_a_wrong_owner_count_a_lost_page_and_a_wrong_digest_are_detected():
    pool, sequence = PagePool(num_pages=2, page_size=3), sequence_of(9, 1)
    pool.grow(sequence, 3)
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([sequence, sequence])
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([])
    pool = PagePool(num_pages=3, page_size=3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="a page is lost"):
        pool.check_integrity([])
    pool, sequence = PagePool(num_pages=3, page_size=3), sequence_of(7, 1)
    pool.grow(sequence, 7)
    sequence.filled = [7]
    pool.publish(sequence, since=0)
    pool.check_integrity([sequence])
    pool._digest_of.popitem()
    with pytest.raises(AssertionError, match="wrong digest"):
        pool.check_integrity([sequence])


@given(st.integers(1, 5), st.integers(1, 20))
def test_every_position_has_a_slot_of_its_own_in_its_page(page_size, num_tokens):
    pool, sequence = PagePool(num_pages=30, page_size=page_size), sequence_of(num_tokens, 1)
    pool.grow(sequence, num_tokens)
    places = slots(sequence, range(num_tokens), page_size)
    assert len({*places}) == num_tokens
    assert [place // page_size for place in places] == [sequence.pages[t // page_size] for t in range(num_tokens)]
    assert slots(sequence, range(num_tokens // 2, num_tokens), page_size) == places[num_tokens // 2 :]
