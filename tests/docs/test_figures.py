"""Speed-ups on the pages come from measurements in benchmarks/, whose table has each of its files."""

import re

from tests.docs.pages import PAGES, ROOT

FOLDER = ROOT / "benchmarks"
RATIO = re.compile(r"\d\.\d+(?: to \d\.\d+)? times")
FILE = re.compile(r"benchmarks/([\w-]+\.json)")
OF_OTHERS = ("CHANGELOG.md", "docs/LOG.md", "nvium_core/checkpoints/stories-24m/README.md")
"""Pages of history, and the model card, whose ratio counts passes over the text."""


def paragraphs(text: str) -> list[str]:
    """Split a page into paragraphs, items of lists and rows of tables."""
    return re.split(r"\n\s*\n|\n(?=[-|] ?)", text)


def test_a_paragraph_with_a_speed_up_names_its_file_and_all_named_files_exist() -> None:
    pages = [page for page in PAGES if page not in OF_OTHERS and page != "benchmarks/README.md"]
    texts = [(page, part) for page in pages for part in paragraphs((ROOT / page).read_text(encoding="utf-8"))]
    assert [(page, part) for page, part in texts if RATIO.search(part) and not FILE.search(part)] == []
    named = {name for _, part in texts for name in FILE.findall(part)}
    assert named
    assert {name for name in named if not (FOLDER / name).is_file()} == set()


def test_the_index_has_every_file_and_every_target_names_one() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    index, targets = text.split("## Targets")
    files = {path.stem for path in FOLDER.glob("*.json")}
    for stem in files - {"gpu-nodes", "conformance"}:  # named elsewhere
        first, _, last = stem.rpartition("-")
        rows = [row for row in index.splitlines() if f"`{stem}`" in row or (f"`-{last}`" in row and f"`{first}" in row)]
        assert rows, stem
    for row in [row for row in targets.split("\n## ")[0].splitlines() if row.startswith("| ")][2:]:
        assert set(re.findall(r"`([\w-]+)`", row.split(" | ")[-1])) & files, row
