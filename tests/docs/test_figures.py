"""Measured figures on the pages come from files in benchmarks/, whose index has command, machine and commit of each."""

import re

from tests.docs.pages import PAGES, ROOT

FOLDER = ROOT / "benchmarks"
RATIO = re.compile(r"\d\.\d+(?: to \d\.\d+)? times")
SHARE_OR_RATE = re.compile(r"\d\.\d+%|\d tokens/s|tokens a second")
TIME_OR_SIZE = re.compile(r"\d (?:µs|ms|s|seconds|minutes|hours|MB|GB)\b")
FILE = re.compile(r"benchmarks/([\w-]+\.json)")
CALCULATED = "Calculated"
OF_OTHERS = ("CHANGELOG.md", "docs/LOG.md", "nvium_core/checkpoints/stories-24m/README.md", "data/tales/README.md")
"""Pages of history; the model card, whose ratio counts passes over the text; and the page of the data."""

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


def test_the_index_has_every_file_with_machine_and_commit_and_every_target_names_one() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    index, targets = text.split("## Targets")
    files = {path.stem for path in FOLDER.glob("*.json")}
    for stem in files - {"gpu-nodes", "conformance"}:  # named elsewhere
        first, _, last = stem.rpartition("-")
        hits = [row for row in index.splitlines() if f"`{stem}`" in row or (f"`-{last}`" in row and f"`{first}" in row)]
        *_, machine, commits = hits[0].removesuffix(" |").split(" | ")
        assert machine, stem
        assert re.fullmatch(r"[0-9a-f]{7,8}(, [0-9a-f]{7,8})*", commits), stem
    for row in [row for row in targets.split("\n## ")[0].splitlines() if row.startswith("| ")][2:]:
        assert set(re.findall(r"`([\w-]+)`", row.split(" | ")[-1])) & files, row
