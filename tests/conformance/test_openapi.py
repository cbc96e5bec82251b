"""Schemathesis reads our OpenAPI document and tries to find answers it does not allow."""

import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from server.app import ENDPOINTS
from server.routes.openapi import document
from server.telemetry.record import OTHER
from tests.conformance.programs import run
from tests.conformance.serving import Served, served

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
DEFAULT = "default"
NOT_PROMISED = "positive_data_acceptance"
"""A value of the right type may still be refused: too long a prompt, a model that is not here."""

SMALL = {"context": 32, "max_new_tokens": 256, "max_n": 4, "max_prompts": 8}
"""Settings with which an arbitrary request ends soon."""

OPTIONS = (
    *("--checks", "all", "--exclude-checks", NOT_PROMISED),
    *("--mode", "all", "--phases", "examples,coverage,fuzzing,stateful", "--continue-on-failure"),
    *("--seed", "1", "--generation-database", "none", "--request-timeout", "30", "--no-color"),
)

CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 403, 404, 405, 413, 415]
"""
"""The statuses that refuse invalid data. Schemathesis does not expect 413, which a list of 3 MB gets."""


@pytest.fixture
def openapi(tmp_path: Path) -> Path:
    """Our document, but that a request's model, if it has to name one, is one that is here: any other name is refused
    before all else."""
    path, told = tmp_path / "openapi.json", deepcopy(document())
    for schema in request_schemas(told):
        is_required = "model" in schema.get("required", ())
        schema["properties"]["model"]["enum"] = [DEFAULT] if is_required else [DEFAULT, None]
    path.write_text(json.dumps(told), encoding="utf-8")
    path.with_name("schemathesis.toml").write_text(CONFIGURATION)
    return path


def request_schemas(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for operation in (operation for methods in told["paths"].values() for operation in methods.values()):
        if body := operation.get("requestBody"):
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            yield told["components"]["schemas"][name]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_examples", [20, pytest.param(400, marks=pytest.mark.conformance)])
def test_schemathesis_finds_no_answer_that_the_document_does_not_allow(openapi, record, num_examples):
    with served(**SMALL) as server:
        options = ("--url", server.url, "--max-examples", str(num_examples), *OPTIONS)
        output = run([SCHEMATHESIS, "run", openapi, *options], seconds=3000, cwd=openapi.parent)
        answered = endpoints_that_completed(server)
    test_cases = re.search(r"Test cases:\s+(.*)", output)
    record("schemathesis", version("schemathesis"), test_cases=test_cases[1] if test_cases else "none")
    assert answered == {*ENDPOINTS.values(), OTHER}


def endpoints_that_completed(server: Served) -> set[str]:
    """Those where some data was good: where none is, little has been tried."""
    requests = [sample for sample in server.samples() if sample.name == "nvium_requests_total" and sample.value]
    return {sample.labels["endpoint"] for sample in requests if sample.labels["outcome"] == "completed"}
