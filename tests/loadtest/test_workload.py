import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workload import Lengths, Workload, WorkloadError, read_prompts

PROMPTS = ("a", "b")


def test_prompts_repeat_and_every_request_has_its_own_seed():
    requests = list(Workload(prompts=PROMPTS, num_requests=3, seed=10).requests())
    assert [(request.prompt, request.seed) for request in requests] == [("a", 10), ("b", 11), ("a", 12)]


def test_the_open_loop_arrives_in_order_at_its_rate():
    arrivals = [request.arrival for request in Workload(num_requests=4000, rate=20.0).requests()]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.1)


@pytest.mark.parametrize("line", ["not json", "[]", "{}", "3", '{"turns": []}', '{"prompt": 3}'])
def test_an_entry_without_a_prompt_is_rejected_by_number(tmp_path, line):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "fine"}\n{"turns": ["first", "second"], "category": "qa"}\n')
    assert read_prompts(path) == ("fine", "first")
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(WorkloadError, match="entry 2"):
        read_prompts(path)


@given(low=st.integers(1, 50), more=st.integers(0, 50), seed=st.integers())
def test_lengths_are_drawn_within_their_bounds(low, more, seed):
    lengths = Lengths(low, low + more)
    draws = random.Random(seed)
    assert all(low <= lengths.draw(draws) <= low + more for _ in range(20))
    assert Lengths.parse(str(lengths)) == lengths
