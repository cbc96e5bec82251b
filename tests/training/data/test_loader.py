"""Batches made ahead."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.training.data.loader import prefetched, timed


@given(items=st.lists(st.integers()), num_ahead=st.integers(1, 4))
def test_items_come_in_order_and_none_is_lost(items: list[int], num_ahead: int) -> None:
    assert list(prefetched(items, num_ahead)) == items


def test_items_are_made_before_they_are_asked_for() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    ahead = prefetched(items())
    assert next(ahead) == 0
    assert made.wait(10)
    assert list(ahead) == [1]


def test_what_making_an_item_raises_is_raised_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("the second")

    ahead = prefetched(items())
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="the second"):
        next(ahead)


def test_what_is_waited_for_an_item_is_told_and_the_time_between_them_is_not() -> None:
    def slow() -> Iterator[int]:
        for item in range(2):
            time.sleep(0.05)
            yield item

    found = []
    started = time.monotonic()
    for item, waited in timed(slow()):
        time.sleep(0.2)
        found.append((item, waited))
    assert [item for item, _ in found] == [0, 1]
    assert all(waited >= 0.05 for _, waited in found)
    assert sum(waited for _, waited in found) <= time.monotonic() - started - 0.4
