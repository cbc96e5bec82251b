from hypothesis import given
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.engine.schedule.sequence import SCORE_WINDOW, Sequence

SCORED = SamplingParams(logprobs=0)
SCORED_WITH_PROMPT = SamplingParams(logprobs=0, prompt_logprobs=True)


def sequence_of(num_tokens: int, num_blocks: int, params: SamplingParams | None = None) -> Sequence:
    tokens = list(range(num_tokens))
    return Sequence("s", tokens, params or SamplingParams(), seed=0, num_blocks=num_blocks, arrival=0)


@given(st.integers(1, 20), st.integers(1, 5), st.data())
def test_every_row_passes_every_block_in_order_and_the_staircase_stays_monotone(num_tokens, num_blocks, data):
    sequence = sequence_of(num_tokens, num_blocks)
    passed: list[list[int]] = [[] for _ in range(num_blocks)]
    for _ in range(data.draw(st.integers(0, 40))):
        runnable = [block for block in range(num_blocks) if sequence.pending_rows(block)]
        if not runnable:
            sequence.append(0)
            continue
        block = data.draw(st.sampled_from(runnable))
        rows = sequence.pending_rows(block)[: data.draw(st.integers(1, 20))]
        sequence.filled[block] = rows.stop
        passed[block] += rows
        if rows.stop == sequence.num_tokens and data.draw(st.booleans()):
            sequence.append(0)
        stairs = [sequence.num_tokens, *sequence.filled]
        assert stairs == sorted(stairs, reverse=True)
    assert passed == [list(range(filled)) for filled in sequence.filled]


def test_the_example_in_the_documentation_is_correct():
    sequence = sequence_of(16, 4)
    sequence.filled = [16, 13, 13, 8]
    assert sequence.pending_rows(3) == range(8, 13)
    assert sequence.pending_rows(1) == range(13, 16)
    assert sequence.ready_block == 1
    assert sequence.deepest_pending_block == 3
    assert sequence.num_deferred_rows == 0
    sequence.append(9)
    assert sequence.num_deferred_rows == 8


def test_a_reset_keeps_the_tokens_and_the_row_of_the_last_token_is_not_computed():
    sequence = sequence_of(3, 2)
    sequence.filled[0] = 3
    sequence.reset()
    assert (sequence.filled, sequence.num_tokens) == ([0, 0], 3)
    sequence.append(9)
    assert (sequence.num_rows, sequence.pending_rows(0)) == (4, range(4))
    sequence.finish_reason = "length"
    assert (sequence.num_rows, sequence.pending_rows(0)) == (3, range(3))


def test_front_rows_and_rows_to_score_do_not_come_from_the_prefix_cache():
    assert sequence_of(9, 2).num_cacheable_rows == 8
    assert sequence_of(9, 2, SCORED).num_cacheable_rows == 8
    scored = sequence_of(9, 2, SCORED_WITH_PROMPT)
    assert scored.num_cacheable_rows == 0
    scored.num_scored = 5
    assert scored.num_cacheable_rows == 5


def test_rows_that_wait_for_scores_are_bounded():
    sequence = sequence_of(100, 2, SCORED_WITH_PROMPT)
    assert sequence.pending_rows(0) == range(99)
    sequence.filled[0] = 10
    assert not sequence.must_catch_up
    sequence.filled[0] = 99
    assert sequence.must_catch_up
    assert sequence.deepest_pending_block == 1


@given(st.integers(1, 60), st.integers(0, 40), st.integers(1, 4), st.booleans(), st.data())
def test_all_scores_arrive_within_the_window(num_tokens, max_tokens, num_blocks, is_prompt_scored, data):
    sequence = sequence_of(num_tokens, num_blocks, SCORED_WITH_PROMPT if is_prompt_scored else SCORED)
    sequence.finish_reason = None if max_tokens else "length"
    while sequence.owes_scores or not sequence.finish_reason:
        assert sequence.num_tokens - 1 - sequence.num_scored <= SCORE_WINDOW or sequence.num_generated == 0
        block = sequence.deepest_pending_block if data.draw(st.booleans()) else sequence.ready_block
        rows = sequence.pending_rows(block)[: data.draw(st.integers(1, 40))]
        sequence.filled[block] = rows.stop
        first = max(rows.start, sequence.first_scored)
        sequence.num_scored += max(0, rows.stop - first) if block == num_blocks - 1 else 0
        if rows.stop == sequence.num_tokens and (block == num_blocks - 1 or data.draw(st.booleans())):
            sequence.append(0)
            sequence.finish_reason = "length" if sequence.num_generated == max_tokens else None
    assert sequence.num_scored == sequence.num_tokens - 1
