"""Measured figures on the pages come from benchmarks/, and prose names no other."""

import re
from pathlib import Path

import pytest

from docs.tables import __main__ as program
from docs.tables.table import MARKED, ROOT, TABLES, names, rendered

PAGES = program.pages()
READ = [*sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")), "README.md", "ARCHITECTURE.md"]
RECORDS = ("docs/LOG.md",)
"""Figures of a day that is over."""

UNITS = r"ms|µs|s|seconds?|minutes?|tokens/s|[KMG]i?B|%|times|nats|Gflop/s|(?:tokens|requests) (?:per|a) second"
FIGURE = re.compile(rf"(?<![\w.`/:-])((?:\d[\d,]*)?(?:\.\d+)?)\s?(?:{UNITS})(?!\w)|(?<![\w.`/:-])(\d?\.\d+)(?![\w.])")
"""A number with a unit, or a decimal fraction."""

NOT_MEASURED: dict[str, set[str]] = {
    "README.md": {"3.11", "3.12"},
    "docs/capacity.md": {"40", "100"},
    "docs/decisions/server.md": {"60"},
    "docs/deploying.md": {"4", "10", "15", "30"},
    "docs/evaluation.md": {".5", ".7", "0.95", "95"},
    "docs/exactness.md": {".001"},
    "docs/fields.md": {"30"},
    "docs/glossary.md": {"95"},
    "docs/models.md": {"0.19", "0.27", "0.54", "1.1", "2.5", "3.1", "3.2", "4.9", "16", "32"},
    "docs/monitoring.md": {"0.97", "2", "5", "10", "15", "30", "40", "85"},
    "docs/playground.md": {"0.7", "0.95"},
    "docs/quickstart.md": {"0.7", "0.95", "3.11", "3.12"},
    "docs/replicas.md": {"2", "2.5", "15", "25", "30"},
    "docs/results.md": {"11", "95"},
    "docs/retrofit.md": {"0.2", "1.2", "1.8"},
    "docs/security.md": {"32", "64"},
    "docs/training.md": {"0.05", "5"},
}
"""Defaults, bounds, targets, the paper's figures and examples, by page."""


def prose(text: str) -> str:
    """Without rendered tables, blocks of code, and code within lines."""
    lines = [line for line in MARKED.sub("", text).splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`]*`", "", "\n".join(lines))


def figures(text: str) -> set[str]:
    return {(found[1] or found[2]).rstrip(",") for found in FIGURE.finditer(text) if found[1] or found[2]}


def unsupported(page: str, text: str) -> set[str]:
    """Figures of the prose that no table of the page has."""
    shown = set(re.findall(r"[\d,.]*\d", "".join(found.group() for found in MARKED.finditer(text))))
    return figures(prose(text)) - NOT_MEASURED.get(page, set()) - shown


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_that_the_files_give(page: str) -> None:
    assert PAGES[page] == rendered(PAGES[page]), "run `python -m docs.tables`"


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    page = "docs/speed.md"
    changed = re.sub(r"\| \d\.\d\d \|", "| 9.99 |", PAGES[page], count=1)
    assert changed != PAGES[page]
    assert rendered(changed) == PAGES[page]


def test_the_program_says_which_pages_differ_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "new.md"
    page.write_text("before\n<!-- table: limit -->\nold\n<!-- end -->\nafter\n")
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no table\n")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.main(["--check"]) == 1
    assert "docs/new.md" in capsys.readouterr().out
    assert program.main([]) == 0
    assert program.main(["--check"]) == 0
    assert page.read_text().startswith("before\n<!-- table: limit -->\n| a block")
    assert page.read_text().endswith("<!-- end -->\nafter\n")


def test_every_table_is_on_a_page() -> None:
    assert {name for text in PAGES.values() for name in names(text)} == TABLES.keys()


@pytest.mark.parametrize("page", [page for page in READ if page not in RECORDS])
def test_prose_names_no_figure_that_is_not_in_a_table_of_its_page(page: str) -> None:
    found = unsupported(page, (ROOT / page).read_text(encoding="utf-8"))
    assert found == set(), "measured? show it in a table of docs/tables; else name it in NOT_MEASURED"


@pytest.mark.parametrize(
    "sentence", ["It takes 12 ms.", "1.4 times as fast", "a share of .73", "2.2 GB more", "40 tokens/s", "by 5%"]
)
def test_a_figure_in_prose_is_found(sentence: str) -> None:
    assert len(unsupported("docs/speed.md", sentence)) == 1


@pytest.mark.parametrize("sentence", ["layers 4 to 12", "`--rate .5`", "24 × 768 in bfloat16", "v2.13.0", "port 8000"])
def test_a_number_that_is_no_figure_passes(sentence: str) -> None:
    assert unsupported("docs/speed.md", sentence) == set()


def test_nothing_is_excused_that_no_page_says() -> None:
    for page, excused in NOT_MEASURED.items():
        assert excused <= figures(prose((ROOT / page).read_text(encoding="utf-8"))), page
