"""One server for all clients, and the table of what each of them found."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from tests.conformance.serving import Served, served

Record = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance-json", type=Path, help="write what other people's programs found to this file")


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Keeps a row of the table: the program, its version, and figures."""

    def keep(program: str, version: str, **figures: object) -> None:
        record_property("conformance", {"program": program, "version": version, "figures": figures})

    return keep


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    rows = list(recorded(terminalreporter))
    if not rows:
        return
    terminalreporter.section("conformance")
    for row in rows:
        figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["figures"].items())
        terminalreporter.line(f"{row['program']:<28} {row['version']:<10} {row['outcome']:<7} {figures}")
    if path := config.getoption("--conformance-json", None):
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded(reporter: TerminalReporter) -> Iterator[dict[str, Any]]:
    """What tests have kept, in their order, with their outcome."""
    for outcome in ("passed", "failed"):
        for report in reporter.stats.get(outcome, []):
            for name, kept in getattr(report, "user_properties", []):
                if name == "conformance" and report.when == "call":
                    yield {**kept, "outcome": outcome}
