"""Renders registered tables between a page's markers."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Cell = str | None
Table = tuple[Sequence[str], Iterable[Sequence[Cell]]]
"""The head, and the rows."""

TABLES: dict[str, Callable[[], Table]] = {}


def table(make: Callable[[], Table]) -> Callable[[], Table]:
    """Register a table under its function's name, with dashes for underscores."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def markdown(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [head, ["---"] * len(head), *([cell or "" for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def rendered(page: str) -> str:
    """Return the page's text with every table up to date. Raise `KeyError` for an unknown table."""
    return MARKED.sub(lambda found: f"{found[1]}{markdown(*TABLES[found[2]]())}{found[3]}", page)
