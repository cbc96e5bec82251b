import json

from research.speed.prompts import MULTI_TURN, read_questions

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "coding", "turns": ["Code."]},
    {"question_id": 3, "category": "qa", "turns": ["Who?"], "reference": ["a fox"]},
    {"question_id": 4, "category": "qa", "turns": ["Why?\nTell."]},
]


def test_first_turns_are_read_and_kinds_of_conversation_are_one_category(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    assert read_questions(path) == {MULTI_TURN: ["Write.", "Code."], "qa": ["Who?", "Why?\nTell."]}
    assert read_questions(path, per_category=1) == {MULTI_TURN: ["Write."], "qa": ["Who?"]}
