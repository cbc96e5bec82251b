"""The rows of a tied Step, in which a row moves by at most one block."""

from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.schedule.step import Run
from tests.engine.schedule.test_sequence import sequence_of


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6), st.lists(st.integers(1, 7), max_size=40))
def test_a_tied_step_keeps_the_staircase_monotone_and_runs_as_many_rows_as_it_was_granted(stairs, grants):
    num_tokens, *filled = sorted(stairs, reverse=True)
    num_tokens, last = num_tokens + 1, len(filled) - 1
    sequence = sequence_of(num_tokens, len(filled))
    for grant in grants:
        if filled[last] == num_tokens:
            break
        stop = min(num_tokens, filled[last] + grant)
        run = Run(sequence, stop)
        rows = [run.rows(block, filled, is_tied=True) for block in range(len(filled))]
        assert sum(map(len, rows)) == stop - filled[last]
        before = [num_tokens, *filled]
        assert all(before[block] > row >= before[block + 1] for block, own in enumerate(rows) for row in own)
        filled = [max(done, own.stop) for done, own in zip(filled, rows, strict=True)]
        assert [num_tokens, *filled] == sorted([num_tokens, *filled], reverse=True)
        assert all(new >= old for new, old in zip(filled, before[1:], strict=True)), "nothing is lowered"
        assert sum(num_tokens - 1 in own for own in rows) == (stop == num_tokens and filled != before[1:])


def test_the_example_of_a_tied_step():
    rows = [Run(sequence_of(16, 4), 16).rows(block, [16, 13, 13, 8], is_tied=True) for block in range(4)]
    assert rows == [range(16, 16), range(13, 16), range(13, 13), range(8, 13)]
