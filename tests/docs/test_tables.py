"""The tables on the pages are up to date with the code."""

from docs.tables.__main__ import PAGES
from docs.tables.table import MARKED, TABLES, rendered

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def test_no_page_is_stale() -> None:
    stale = [page for page, text in TEXTS.items() if rendered(text) != text]
    assert stale == [], "run `python -m docs.tables`"


def test_every_table_is_on_a_page() -> None:
    assert {found[2] for text in TEXTS.values() for found in MARKED.finditer(text)} == TABLES.keys()
