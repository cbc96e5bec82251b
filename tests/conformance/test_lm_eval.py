"""The language-model evaluation harness finds over HTTP what it finds in the weights.

`local-completions` scores prompts by echo and logprobs, as lm_eval does with any server; `hf` loads the same folder
with transformers. The tasks are a few items of our own in tests/conformance/tasks, a task for each kind of request.
Only `hf` leaves it to the tokenizer whether a text begins with the beginning-of-text token; the other must be told.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import CLIENTS, installed, pinned, run
from tests.conformance.serving import ROOT, Served

TASKS = Path(__file__).parent / "tasks"
RUNNER = "from lm_eval.__main__ import cli_evaluate; import nvium_core.model.nvium; cli_evaluate()"
"""lm_eval's command line, in a process where transformers' AutoModelForCausalLM knows N-vium."""

[PAGES_ARGUMENTS] = re.findall(r"--model_args (\S+)", (ROOT / "docs/evaluation.md").read_text(encoding="utf-8"))

SCORED = ("nvium_choices", "nvium_endings", "nvium_passages")
GENERATED = "nvium_continuations"
TOLERANCE = 1e-4

Samples = dict[str, list[Any]]


def evaluate(model: str, arguments: str, folder: Path, batch_size: int = 1) -> Samples:
    """Each task's answers, document by document, as lm_eval logs them."""
    command: list[str | Path] = [
        installed(CLIENTS / "bin" / "python"), "-c", RUNNER, "run", "--model", model, "--model_args", arguments,
        "--tasks", ",".join((*SCORED, GENERATED)), "--include_path", TASKS,
        "--device", "cpu", "--batch_size", str(batch_size), "--log_samples", "--output_path", folder,
    ]  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    run(command, seconds=280, cwd=TASKS, environment=environment)
    return {task: answers(folder, task) for task in (*SCORED, GENERATED)}


def answers(folder: Path, task: str) -> list[Any]:
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda s: s["doc_id"])
    return [answer[0] for sample in samples for answer in sample["resps"]]


@pytest.fixture(scope="module")
def from_weights(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return evaluate("hf", f"pretrained={server.folder},dtype=float32", tmp_path_factory.mktemp("weights"))


@pytest.mark.conformance
@pytest.mark.parametrize("at_once", [(1, 8), (4, 1)])
def test_lm_eval_finds_over_http_what_it_finds_in_the_weights(server, from_weights, tmp_path, record, at_once):
    num_concurrent, batch_size = at_once
    arguments = PAGES_ARGUMENTS.replace("http://127.0.0.1:8000/v1", server.api).replace("FOLDER", str(server.folder))
    arguments = arguments.replace("num_concurrent=4", f"num_concurrent={num_concurrent}")
    over_http = evaluate("local-completions", arguments, tmp_path, batch_size)
    pairs = [pair for task in SCORED for pair in zip(over_http[task], from_weights[task], strict=True)]
    differences = [abs(log_likelihood(ours) - log_likelihood(theirs)) for ours, theirs in pairs]
    same_argmax = [is_greedy(over_http[task]) == is_greedy(from_weights[task]) for task in SCORED]
    figures: dict[str, Any] = {"requests_at_once": num_concurrent, "prompts_of_a_request": batch_size}
    figures |= {"log_likelihoods": len(differences), "largest_difference": f"{max(differences):.1e}"}
    record("lm_eval", pinned("lm_eval"), **figures, continuations=len(over_http[GENERATED]))
    assert max(differences) < TOLERANCE
    assert all(same_argmax)
    assert over_http[GENERATED] == from_weights[GENERATED]


def log_likelihood(answer: Any) -> float:
    """A rolling answer is the number alone, the others come with whether the continuation is the argmax."""
    return float(answer if isinstance(answer, str | float) else answer[0])


def is_greedy(of_task: list[Any]) -> list[str]:
    return [answer[1] for answer in of_task if isinstance(answer, list)]
