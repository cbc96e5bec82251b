"""What was measured on what: evaluations of different texts or prompts are told apart, with digests and without."""

import lzma
from pathlib import Path
from typing import Any

import pytest

from nvium_core.evaluation import comparison
from nvium_core.evaluation.origin import differences, measured_on
from nvium_core.training.data.documents import read_documents

TEXT = "One fox.\n<|endoftext|>\nTwo foxes.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def measured(text: Path, *, model: str, length: int = 18, **speed: Any) -> dict[str, Any]:
    return {"model": model, "num_characters": length, **measured_on(text, read_documents(text)), **speed}


def test_the_same_documents_are_the_same_text_however_they_are_packed(text: Path) -> None:
    packed = text.with_suffix(".txt.xz")
    packed.write_bytes(lzma.compress(TEXT.encode()))
    assert differences([measured(text, model="a"), measured(packed, model="b")]) == ""


def test_texts_of_equal_length_are_told_apart_by_their_digests(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("fox", "hen"))
    told = differences([measured(text, model="a"), measured(other, model="b"), measured(text, model="c")])
    assert "perplexities and gains cannot be compared" in told
    assert "- text.txt (2 documents, 18 characters, sha256 " in told
    assert told.splitlines()[2].endswith("…): a; c")
    assert told.splitlines()[3].endswith("…): b")
    assert "prompts" not in told


def test_without_a_digest_the_number_of_characters_decides(text: Path) -> None:
    older = {"model": "older", "num_characters": 18}
    assert differences([older, measured(text, model="newer")]) == ""
    told = differences([older | {"num_characters": 19}, measured(text, model="newer")])
    assert "- 19 characters: older" in told


def test_what_says_nothing_of_its_text_is_not_judged(text: Path) -> None:
    assert differences([{"model": "drawn"}, measured(text, model="a")]) == ""


def test_prompts_are_told_apart_by_number_by_digest_and_by_the_text_they_open(text: Path, tmp_path: Path) -> None:
    questions = [tmp_path / name for name in ("question.jsonl", "questions.jsonl")]
    for number, path in enumerate(questions):
        path.write_text(str(number))
    asked = [
        measured(text, model=path.stem, prompts={"qa": 2}) | measured_on(text, ["One fox."], path) for path in questions
    ]
    assert "2 prompts of 1 categories of questions.jsonl (sha256 " in differences(asked)
    assert differences([asked[0], asked[0]]) == ""
    opened = [measured(text, model="a", prompts={"openings": number}) for number in (3, 8)]
    assert "- 8 openings of text.txt (2 documents" in differences(opened)
    latency = {"categories": {"openings": {"prompts": 3}}}
    assert differences([opened[0], measured(text, model="b", latency=latency)]) == ""


def test_the_table_of_models_says_so_below(text: Path) -> None:
    models: list[dict[str, Any]] = [measured(text, model="a"), {"model": "b", "num_characters": 1}]
    assert "Not of the same text" in comparison.markdown(models)
    assert "Not of the same text" not in comparison.markdown(models[:1])
