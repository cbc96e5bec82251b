from docs.tables.__main__ import PAGES
from docs.tables.table import MARKED, TABLES, rendered

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def test_every_table_is_on_a_page_and_no_page_is_stale():
    assert [page for page, text in TEXTS.items() if rendered(text) != text] == [], "run `python -m docs.tables`"
    assert {found[2] for text in TEXTS.values() for found in MARKED.finditer(text)} == TABLES.keys()
