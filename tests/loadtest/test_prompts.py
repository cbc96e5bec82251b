import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.prompts import Lengths, Prompt, WorkloadError, random_prompts, read_prompts


def spec_bench(folder: Path, *categories: str) -> Path:
    path = folder / "question.jsonl"
    questions = [
        {"question_id": number, "category": category, "turns": [f"{number} {category}", "more"]}
        for number, category in enumerate(categories)
    ]
    path.write_text("".join(f"{json.dumps(question)}\n" for question in questions), encoding="utf-8")
    return path


def test_spec_bench_prompts_are_first_turns_with_categories(tmp_path):
    prompts = read_prompts(spec_bench(tmp_path, "qa", "writing"))
    assert prompts == (Prompt("0 qa", "qa"), Prompt("1 writing", "multi-turn"))


@pytest.mark.parametrize(
    "line", ["not json", "[]", "{}", "3", '{"turns": []}', '{"prompt": 3}', '{"prompt": "a", "category": 3}']
)
def test_an_entry_without_a_prompt_is_rejected_by_number(tmp_path, line):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(WorkloadError, match="entry 2"):
        read_prompts(path)


@given(low=st.integers(1, 50), more=st.integers(0, 50), seed=st.integers())
def test_lengths_are_drawn_within_their_bounds(low, more, seed):
    lengths = Lengths(low, low + more)
    draws = random.Random(seed)
    assert all(low <= lengths.draw(draws) <= low + more for _ in range(20))
    assert Lengths.parse(str(lengths)) == lengths


def test_random_prompts_are_distinct_and_reproducible():
    prompts = random_prompts([3, 5, 8, 13], Lengths(20, 24), 50, seed=1)
    assert len(set(prompts)) == 50
    assert {len(prompt.content) for prompt in prompts} == {20, 21, 22, 23, 24}
    assert set().union(*(prompt.content for prompt in prompts)) == {3, 5, 8, 13}
    assert prompts == random_prompts([3, 5, 8, 13], Lengths(20, 24), 50, seed=1)
