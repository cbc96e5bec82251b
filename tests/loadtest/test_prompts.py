import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.prompts import Lengths, Prompt, WorkloadError, random_prompts, read_prompts


def spec_bench(folder: Path, *categories: str) -> Path:
    """A question for each of these, named by its place and category."""
    path = folder / "question.jsonl"
    questions = [
        {"question_id": number, "category": category, "turns": [f"{number} {category}", "more"]}
        for number, category in enumerate(categories)
    ]
    path.write_text("".join(f"{json.dumps(question)}\n" for question in questions), encoding="utf-8")
    return path


def test_text_holds_a_prompt_per_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo ü\n", encoding="utf-8")
    assert read_prompts(path) == (Prompt("one"), Prompt("two ü"))


def test_spec_bench_gives_its_first_turns_and_categories(tmp_path: Path):
    prompts = read_prompts(spec_bench(tmp_path, "qa", "writing"))
    assert prompts == (Prompt("0 qa", "qa"), Prompt("1 writing", "multi-turn"))


def test_an_entry_may_also_be_a_prompt_without_a_category(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "plain"}\n')
    assert read_prompts(path) == (Prompt("plain"),)


def test_categories_take_turns(tmp_path: Path):
    prompts = read_prompts(spec_bench(tmp_path, "qa", "qa", "qa", "rag", "math", "rag"))
    assert [prompt.category for prompt in prompts] == ["qa", "rag", "multi-turn", "qa", "rag", "qa"]


def test_only_the_named_categories_are_read(tmp_path: Path):
    prompts = read_prompts(spec_bench(tmp_path, "qa", "rag", "math", "coding"), ["rag", "multi-turn"])
    assert [prompt.content for prompt in prompts] == ["1 rag", "2 math", "3 coding"]


def test_an_unknown_category_is_named_with_those_that_there_are(tmp_path: Path):
    with pytest.raises(WorkloadError, match="no category poems; there are: qa, multi-turn"):
        read_prompts(spec_bench(tmp_path, "qa", "math"), ["qa", "poems"])


def test_a_file_without_prompts_is_refused(tmp_path: Path):
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    with pytest.raises(WorkloadError, match="no prompts"):
        read_prompts(path)


@pytest.mark.parametrize(
    "line", ["not json", "[]", "{}", "3", '{"turns": []}', '{"prompt": 3}', '{"prompt": "a", "category": 3}']
)
def test_an_entry_without_a_prompt_is_named(tmp_path: Path, line: str):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(WorkloadError, match="entry 2"):
        read_prompts(path)


@given(low=st.integers(1, 50), more=st.integers(0, 50), seed=st.integers())
def test_lengths_are_drawn_from_the_first_to_the_last(low: int, more: int, seed: int):
    lengths = Lengths(low, low + more)
    draws = random.Random(seed)
    assert all(low <= lengths.draw(draws) <= low + more for _ in range(20))
    assert Lengths.parse(str(lengths)) == lengths


def test_both_ends_of_lengths_occur():
    draws = random.Random(0)
    assert {Lengths(3, 5).draw(draws) for _ in range(100)} == {3, 4, 5}


@pytest.mark.parametrize("text", ["", "0", "0:4", "5:4", "a", "1:2:3", "-1"])
def test_lengths_that_make_no_sense_are_refused(text: str):
    with pytest.raises(ValueError, match=r".+"):
        Lengths.parse(text)


def test_random_prompts_are_of_known_tokens_and_stated_lengths_and_each_its_own():
    prompts = random_prompts([3, 5, 8, 13], Lengths(20, 24), 50, seed=1)
    assert len(set(prompts)) == 50
    assert {len(prompt.content) for prompt in prompts} == {20, 21, 22, 23, 24}
    assert set().union(*(prompt.content for prompt in prompts)) == {3, 5, 8, 13}
    assert prompts == random_prompts([3, 5, 8, 13], Lengths(20, 24), 50, seed=1)
