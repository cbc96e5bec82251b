"""The tests that openai-python's authors generate from OpenAI's specification, run against this server.

Their sources are those of the installed version; `make` fetches them. openai_python.toml says what is not run or must
fail, and why: a failure that is not expected fails, and so does an expected one that passes or says something else.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.conformance.programs import installed, run
from tests.conformance.serving import served

SOURCES = Path(sys.prefix) / f"openai-{version('openai')}"
MODULES = [f"tests/api_resources/{name}.py" for name in ("test_models", "test_completions", "chat/test_completions")]
EXPECTATIONS = tomllib.loads(Path(__file__).with_name("openai_python.toml").read_text(encoding="utf-8"))

Outcomes = dict[str, str | None]
"""By test: what a failure says, None for one that passed."""


@pytest.mark.slow
def test_openai_pythons_own_tests_fail_only_where_they_are_expected_to(tmp_path, record):
    sources = installed(SOURCES)
    with served(served_model_name=",".join(models_named(sources)), context=128) as server:
        outcomes = run_tests(sources, server.api, tmp_path / "outcomes.xml")
    num_failed = sum(says is not None for says in outcomes.values())
    surprising = list(surprises(outcomes, EXPECTATIONS["expected_failures"]))
    counts = {"passed": len(outcomes) - num_failed, "failed": num_failed, "surprises": len(surprising)}
    record("openai-python's tests", version("openai"), **counts)
    assert len(outcomes) > 100
    assert surprising == []


def models_named(sources: Path) -> list[str]:
    texts = [(sources / module).read_text(encoding="utf-8") for module in MODULES]
    return sorted({name for text in texts for name in re.findall(r'(?:model=|retrieve\(\s*)"([^"]+)"', text)})


def run_tests(sources: Path, api: str, report: Path) -> Outcomes:
    unasked = " and ".join(f"not ({words})" for words in EXPECTATIONS["not_offered"])
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", unasked, f"--junitxml={report}", *MODULES]
    run(command, seconds=280, cwd=sources, environment={"TEST_API_BASE_URL": api}, exit_codes=(0, 1))
    return dict(outcomes_in(report))


def outcomes_in(report: Path) -> Iterator[tuple[str, str | None]]:
    for case in ET.parse(report).iter("testcase"):
        place = case.attrib["classname"].removeprefix("tests.api_resources.").replace("test_", "")
        name = case.attrib["name"].replace("[", ".").rstrip("]")
        assert case.find("error") is None
        assert case.find("skipped") is None
        failure = case.find("failure")
        yield f"{place}.{name}", None if failure is None else failure.attrib["message"]


def surprises(outcomes: Outcomes, expected: dict[str, Any]) -> Iterator[str]:
    """Failures nobody expects, expected ones that pass or say something else, expectations that fit no test."""
    for pattern, expectation in expected.items():
        if not any(fnmatchcase(test, pattern) for test in outcomes):
            yield f"{pattern}: no such test"
        for test, says in outcomes.items():
            if fnmatchcase(test, pattern) and expectation["says"] not in (says or ""):
                yield f"{test}: expected to say {expectation['says']!r}, but {says or 'passed'}"
    for test, says in outcomes.items():
        if says is not None and not any(fnmatchcase(test, pattern) for pattern in expected):
            yield f"{test}: {says}"
