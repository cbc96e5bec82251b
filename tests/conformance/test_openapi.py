"""Schemathesis reads our OpenAPI document and tries to find answers it does not allow."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from server.app import create_app
from server.settings import Settings
from tests.byte_model import load_byte_model
from tests.conformance.conftest import Record
from tests.conformance.programs import run
from tests.conformance.serving import served

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
NOT_PROMISED = "positive_data_acceptance"
"""A value of the right type may still be refused: too long a prompt, a model that is not here."""

SMALL = {"context": 64, "max_new_tokens": 256, "max_n": 4, "max_prompts": 8}
"""Settings with which an arbitrary request ends soon."""

OPTIONS = (
    *("--checks", "all", "--exclude-checks", NOT_PROMISED),
    *("--mode", "all", "--phases", "examples,coverage,fuzzing,stateful", "--continue-on-failure"),
    *("--seed", "1", "--generation-database", "none", "--request-timeout", "30", "--no-color"),
)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Our document, where a model is one that is served: other names are only ever refused."""
    path, openapi = tmp_path / "openapi.json", create_app(load_byte_model(), Settings()).openapi()
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        openapi["components"]["schemas"][name]["properties"]["model"]["enum"] = ["default"]
    path.write_text(json.dumps(openapi), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_examples", [20, pytest.param(400, marks=pytest.mark.conformance)])
def test_schemathesis_finds_no_answer_that_the_document_does_not_allow(
    document: Path, record: Record, num_examples: int
) -> None:
    with served(**SMALL) as server:
        options = ("--url", server.url, "--max-examples", str(num_examples), *OPTIONS)
        finished = run([SCHEMATHESIS, "run", document, *options], seconds=3000, cwd=document.parent)
    test_cases = re.search(r"Test cases:\s+(.*)", finished.output)
    record("schemathesis", version("schemathesis"), test_cases=test_cases[1] if test_cases else "none")
    assert finished.exit_code == 0
