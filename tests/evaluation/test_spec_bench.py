"""Spec-Bench's file, read by category; files that are none are named with the line."""

import json
from pathlib import Path

import pytest

from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.spec_bench import MULTI_TURN, read_prompts

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "coding", "turns": ["Code."]},
    {"question_id": 3, "category": "qa", "turns": ["Who?"], "reference": ["a fox"]},
    {"question_id": 4, "category": "qa", "turns": ["Why?\nTell."]},
]


def written(folder: Path, lines: list[str]) -> Path:
    path = folder / "question.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_first_turns_are_read_and_kinds_of_conversation_are_one_category(tmp_path: Path) -> None:
    path = written(tmp_path, [json.dumps(question) for question in QUESTIONS])
    assert read_prompts(path) == {MULTI_TURN: ["Write.", "Code."], "qa": ["Who?", "Why?\nTell."]}
    assert read_prompts(path, per_category=1) == {MULTI_TURN: ["Write."], "qa": ["Who?"]}


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"category": "qa"}', '{"category": "qa", "turns": []}'])
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(EvaluationError, match=r"question\.jsonl, line 2"):
        read_prompts(written(tmp_path, [json.dumps(QUESTIONS[0]), line]))


def test_turns_that_are_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="must be text"):
        read_prompts(written(tmp_path, ['{"category": "qa", "turns": [3]}']))


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="nowhere"):
        read_prompts(tmp_path / "nowhere")
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(EvaluationError, match="no questions"):
        read_prompts(path)
