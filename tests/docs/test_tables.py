"""Tables on the pages are those that the JSON files in benchmarks/ and the schemas give."""

from docs.tables import __main__ as program
from docs.tables.table import TABLES, names, rendered

PAGES = program.pages()


def test_pages_have_the_tables_that_the_files_give() -> None:
    stale = [page for page, text in PAGES.items() if rendered(text) != text]
    assert stale == [], "run `python -m docs.tables`"


def test_every_table_is_on_a_page() -> None:
    assert {name for text in PAGES.values() for name in names(text)} == TABLES.keys()
