import json

import pytest

from research.speed.spec_bench import (
    MULTI_TURN,
    category_rate_ratio,
    category_rate_ratio_interval,
    rate_ratio,
    rate_ratio_interval,
    read_prompts,
)

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "coding", "turns": ["Code."]},
    {"question_id": 3, "category": "qa", "turns": ["Who?"], "reference": ["a fox"]},
    {"question_id": 4, "category": "qa", "turns": ["Why?\nTell."]},
]


def test_first_turns_are_read_and_kinds_of_conversation_are_one_category(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    assert read_prompts(path) == {MULTI_TURN: ["Write.", "Code."], "qa": ["Who?", "Why?\nTell."]}
    assert read_prompts(path, per_category=1) == {MULTI_TURN: ["Write."], "qa": ["Who?"]}


def test_the_papers_ratio_is_of_total_tokens_over_total_seconds_together_or_by_category():
    ours = {"qa": [(10, 1.0), (30, 1.0)], "math": [(10, 2.0)]}
    dense = {"qa": [(10, 2.0), (10, 2.0)], "math": [(10, 1.0)]}
    assert rate_ratio(ours, dense) == pytest.approx((50 / 4) / (30 / 5))
    assert category_rate_ratio(ours, dense) == pytest.approx((20 / 5 + 5 / 10) / 2)
    assert rate_ratio_interval(ours, dense) is category_rate_ratio_interval(ours, dense) is None
