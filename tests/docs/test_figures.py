"""Measured figures on the pages come from files in benchmarks/, which say how, where, how often and how evenly."""

import json
import re
from collections.abc import Iterator
from typing import Any

from nvium_core.bench.harness import MIN_TURNS
from tests.docs.pages import PAGES, ROOT

FOLDER = ROOT / "benchmarks"
RATIO = re.compile(r"\d\.\d+(?: to \d\.\d+)? times")
SHARE_OR_RATE = re.compile(r"\d\.\d+%|\d tokens/s|tokens a second")
TIME_OR_SIZE = re.compile(r"\d (?:µs|ms|s|seconds|minutes|hours|MB|GB)\b")
FILE = re.compile(r"benchmarks/([\w-]+\.json)")
CALCULATED = "Calculated"
OF_OTHERS = ("CHANGELOG.md", "docs/LOG.md", "nvium_core/checkpoints/stories-24m/README.md", "data/tales/README.md")
"""Pages of history; the model card, whose ratio counts passes over the text; and the page of the data."""

NOT_MEASURED = ("conformance", "gpu-nodes", "stories-runs")
OF_ONE_RUN = ("paper-pair-6x64", "paper-pair-6x96")
"""Their pages say so."""

OF_SETTINGS = ("deploying", "fields", "limits", "monitoring", "security")
"""Pages in docs/ whose times and sizes are limits and defaults."""


def rows(text: str) -> list[str]:
    """Split a page into paragraphs, items of lists and rows of tables."""
    return re.split(r"\n\s*\n|\n(?=[-|] ?)", text)


def paragraphs(text: str) -> list[str]:
    """Split a page into paragraphs and items of lists, each with the table that follows it."""
    return re.split(r"\n\s*\n(?!\|)|\n(?=- )", text)


def test_a_measured_figure_has_its_file_and_all_named_files_exist() -> None:
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES if page not in OF_OTHERS}
    del texts["benchmarks/README.md"]
    pages_of_limits = {"ARCHITECTURE.md", "tests/conformance/README.md", *(f"docs/{name}.md" for name in OF_SETTINGS)}
    parts = [(page, part, RATIO) for page, text in texts.items() for part in rows(text)]
    parts += [(page, part, SHARE_OR_RATE) for page, text in texts.items() for part in paragraphs(text)]
    parts += [(page, part, TIME_OR_SIZE) for page in texts.keys() - pages_of_limits for part in paragraphs(texts[page])]
    is_measured = [(page, part) for page, part, figure in parts if figure.search(part) and CALCULATED not in part]
    assert [(page, part) for page, part in is_measured if not FILE.search(part)] == []
    named = {name for _, part in is_measured for name in FILE.findall(part)}
    assert named
    assert {name for name in named if not (FOLDER / name).is_file()} == set()


def fields(value: Any) -> Iterator[str]:
    """Yield the names of all fields in a JSON value."""
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from fields(each)


def test_every_measurement_has_its_command_processor_commit_number_of_turns_and_spread() -> None:
    for path in {*FOLDER.glob("*.json")} - {FOLDER / f"{name}.json" for name in NOT_MEASURED}:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content if isinstance(content, list) else [content]:
            assert row["command"] and row["processor"], path
            assert re.fullmatch(r"[0-9a-f]{7,8}", row["commit"]), path
            if path.stem in OF_ONE_RUN:
                assert row["n"] == 1
            else:
                assert row["n"] >= MIN_TURNS and row["spread"] in {*fields(row)}, path


def test_every_target_names_its_file() -> None:
    targets = (FOLDER / "README.md").read_text(encoding="utf-8").split("## Targets")[1].split("\n## ")[0]
    files = {path.stem for path in FOLDER.glob("*.json")}
    for row in [row for row in targets.splitlines() if row.startswith("| ")][2:]:
        assert set(re.findall(r"`([\w-]+)`", row.split(" | ")[-1])) & files, row
