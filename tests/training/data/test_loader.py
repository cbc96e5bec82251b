import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.training.data.loader import prefetched


@given(items=st.lists(st.integers()), num_ahead=st.integers(1, 4))
def test_items_come_in_order_and_none_is_lost(items, num_ahead):
    assert list(prefetched(items, num_ahead)) == items


def test_items_are_computed_ahead():
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    ahead = prefetched(items())
    assert next(ahead) == 0
    assert made.wait(10)
    assert list(ahead) == [1]


def test_an_exception_is_raised_where_its_item_would_be_yielded():
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("the second")

    ahead = prefetched(items())
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="the second"):
        next(ahead)
