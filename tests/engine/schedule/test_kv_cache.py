import pytest

from nvium_core.engine.schedule.kv_cache import PagePool
from tests.engine.schedule.test_sequence import sequence_of


def test_a_wrong_owner_count_a_lost_page_and_a_wrong_digest_are_detected():
    pool, sequence = PagePool(num_pages=2, page_size=3), sequence_of(9, 1)
    pool.grow(sequence, 3)
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([sequence, sequence])
    with pytest.raises(AssertionError, match="leaked, or its owner count"):
        pool.check_integrity([])
    pool = PagePool(num_pages=3, page_size=3)
    pool.num_used += 1
    with pytest.raises(AssertionError, match="a page is lost"):
        pool.check_integrity([])
    pool, sequence = PagePool(num_pages=3, page_size=3), sequence_of(7, 1)
    pool.grow(sequence, 7)
    sequence.filled = [7]
    pool.register(sequence, since=0)
    pool.check_integrity([sequence])
    pool._digest_of.popitem()
    with pytest.raises(AssertionError, match="wrong digest"):
        pool.check_integrity([sequence])
