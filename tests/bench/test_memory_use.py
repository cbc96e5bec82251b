"""Waste in the cache: counted by a slow reference, and none beyond a partly filled page each."""

from hypothesis import given
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.bench.memory import measure, rows_by_page, sample
from nvium_core.engine.schedule.sequence import Sequence
from tests.bench.tiny import tiny_subject

PAGE_SIZE = 4


@st.composite
def owners(draw: st.DrawFn) -> list[Sequence]:
    """Sequences of which some share their first pages, perhaps with pages to spare."""
    sequences: list[Sequence] = []
    for number in range(draw(st.integers(1, 4))):
        filled = draw(st.integers(0, 20))
        sequence = Sequence(str(number), [0] * 21, SamplingParams(), seed=0, num_blocks=1, arrival=number)
        num_pages = -(-filled // PAGE_SIZE) + draw(st.integers(0, 2))
        full_before = sequences[-1].filled[0] // PAGE_SIZE if sequences else 0
        num_shared = draw(st.integers(0, min(full_before, filled // PAGE_SIZE)))
        shared = sequences[-1].pages[:num_shared] if sequences else []
        sequence.pages = [*shared, *(100 * number + page for page in range(num_shared, num_pages))]
        sequence.filled = [filled]
        sequences.append(sequence)
    return sequences


@given(owners())
def test_rows_are_counted_once_however_many_share_them(sequences: list[Sequence]) -> None:
    slots = {
        (sequence.pages[t // PAGE_SIZE], t % PAGE_SIZE) for sequence in sequences for t in range(sequence.filled[0])
    }
    pages = {page for sequence in sequences for page in sequence.pages}
    assert rows_by_page(sequences, PAGE_SIZE) == {page: sum(owner == page for owner, _ in slots) for page in pages}


def test_all_sequences_run_at_once_and_own_no_page_without_rows() -> None:
    figures = measure(tiny_subject(), sequences=(6,), tokens=24, every=3)
    [row] = figures["rows"]
    assert max(each["running"] for each in row["samples"]) == 6
    assert row["worst_waste_beyond_a_page_share"] == 0
    assert row["is_within_target"]
    assert row["preemptions"] == 0
    for each in row["samples"]:
        assert 0 < each["needed_bytes"] <= each["owned_bytes"] <= each["full_context_bytes"]
        assert each["owned_bytes"] - each["needed_bytes"] < each["running"] * row["page_bytes"]


def test_a_page_too_many_is_seen() -> None:
    subject = tiny_subject()
    engine = subject.engine(max_sequences=1)
    engine.add("one", subject.prompt, SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
    engine.step()
    assert sample(engine, 1)["waste_beyond_a_page_share"] == 0
    engine.pool.grow(engine.scheduler.running[0], 33)
    assert sample(engine, 1)["waste_beyond_a_page_share"] == 2 * 16 / 5
