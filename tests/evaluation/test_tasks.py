"""lm_eval in this process: local tasks scored as our own sums of log π_mix, where lm_eval is installed."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nvium_core import LoadedModel
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.tasks import evaluate_tasks, scores
from tests.byte_model import load_byte_model

TASK = """
task: animals
dataset_path: json
dataset_kwargs: {data_files: {test: animals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
QUESTIONS = [{"question": f"Question {n}: who", "choices": ["fox", "hen", "owl"], "answer": n % 3} for n in range(12)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "animals.yaml").write_text(TASK)
    (tmp_path / "animals.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    return tmp_path


def log_likelihood(loaded: LoadedModel, context: str, continuation: str) -> float:
    ids = [0, *loaded.tokenizer.encode(context + continuation, add_special_tokens=False)]
    with torch.no_grad():
        log_probs_TV = loaded.model(torch.tensor([ids])).logits[0]
    return sum(float(log_probs_TV[place - 1, ids[place]]) for place in range(1 + len(context), len(ids)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_local_task_is_scored_by_the_mixture(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    found = evaluate_tasks(loaded, ["animals"], folder)
    said = [[log_likelihood(loaded, q["question"], f" {choice}") for choice in q["choices"]] for q in QUESTIONS]
    right = [row.index(max(row)) == q["answer"] for row, q in zip(said, QUESTIONS, strict=True)]
    assert found["animals"]["acc"] == pytest.approx(sum(right) / len(right))
    assert 0 <= found["animals"]["acc_stderr"] < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_is_not_known_is_named(loaded: LoadedModel, folder: Path) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(EvaluationError, match="no frobnicate"):
        evaluate_tasks(loaded, ["animals", "frobnicate"], folder)


def test_where_lm_eval_is_missing_it_is_named_with_its_extra(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvaluationError, match=r"lm_eval.*nvium\[tasks\]"):
        evaluate_tasks(loaded, ["animals"])


def test_scores_are_the_numbers_under_their_own_names() -> None:
    results = {"alias": "animals", "acc,none": 0.5, "acc_stderr,none": 0.1, "word_perplexity_stderr,none": "N/A"}
    assert scores(results) == {"acc": 0.5, "acc_stderr": 0.1}
