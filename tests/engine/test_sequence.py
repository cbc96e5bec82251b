"""The staircase."""

from hypothesis import given
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.engine.sequence import Sequence


def sequence_of(num_tokens: int, num_blocks: int) -> Sequence:
    return Sequence("s", list(range(num_tokens)), SamplingParams(), seed=0, num_blocks=num_blocks, arrival=0)


@given(st.integers(1, 20), st.integers(1, 5), st.data())
def test_every_row_passes_every_block_in_order_and_the_staircase_stays_monotone(
    num_tokens: int, num_blocks: int, data: st.DataObject
) -> None:
    sequence = sequence_of(num_tokens, num_blocks)
    passed: list[list[int]] = [[] for _ in range(num_blocks)]
    for _ in range(data.draw(st.integers(0, 40))):
        runnable = [block for block in range(num_blocks) if sequence.pending_rows(block)]
        if not runnable:
            sequence.append(0)
            continue
        block = data.draw(st.sampled_from(runnable))
        rows = sequence.pending_rows(block)[: data.draw(st.integers(1, 20))]
        sequence.advance(block, rows)
        passed[block] += rows
        if rows.stop == sequence.num_tokens and data.draw(st.booleans()):
            sequence.append(0)
        stairs = [sequence.num_tokens, *sequence.filled]
        assert stairs == sorted(stairs, reverse=True)
    assert passed == [list(range(filled)) for filled in sequence.filled]


def test_the_picture_in_the_documentation_is_what_the_code_says() -> None:
    sequence = sequence_of(16, 4)
    sequence.filled = [16, 13, 13, 8]
    assert sequence.pending_rows(3) == range(8, 13)
    assert sequence.pending_rows(1) == range(13, 16)
    assert sequence.front_block == 1
    assert sequence.deepest_pending_block == 3
    assert sequence.num_deferred_rows == 0
    sequence.append(9)
    assert sequence.num_deferred_rows == 8


def test_a_spoken_token_waits_for_the_first_block_while_its_predecessors_wait_deeper() -> None:
    sequence = sequence_of(3, 2)
    sequence.advance(0, range(3))
    sequence.append(9)
    assert sequence.front_block == 0
    assert sequence.deepest_pending_block == 1
    assert sequence.pending_rows(1) == range(3)


def test_a_reset_forgets_the_stairs_and_keeps_the_tokens() -> None:
    sequence = sequence_of(3, 2)
    sequence.advance(0, range(3))
    sequence.reset()
    assert sequence.filled == [0, 0]
    assert sequence.num_tokens == 3
