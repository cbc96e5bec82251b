"""Renders Markdown tables between a page's markers from JSON files; knows no particular table."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Cell = str | int | float | None
Table = tuple[Sequence[str], Iterable[Sequence[Cell]]]
"""The head, and the rows. A float has two decimals, None is empty."""

TABLES: dict[str, Callable[[], Table]] = {}


def table(make: Callable[[], Table]) -> Callable[[], Table]:
    """Registers a table under its function's name, with dashes for underscores."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def read(name: str) -> Any:
    """The content of `benchmarks/NAME.json`."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def row_of(figures: Any, sequences: int) -> Any:
    [row] = [row for row in figures["rows"] if row["sequences"] == sequences]
    return row


def written(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.2f}".replace("-", "−")
    return f"{cell:,}" if isinstance(cell, int) else cell


def percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f}%".replace("-", "−")


def digits(value: float, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}".replace("-", "−")


def verdict(is_met: bool) -> str:
    return "met" if is_met else "not met"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [head, ["---"] * len(head), *([written(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def rendered(page: str) -> str:
    """A page's text with every table up to date. Raises `KeyError` for an unknown table."""
    return MARKED.sub(lambda found: f"{found[1]}{markdown(*TABLES[found[2]]())}{found[3]}", page)


def names(page: str) -> list[str]:
    return [found[2] for found in MARKED.finditer(page)]


def bracketed(text: str, interval: list[float] | None, decimals: int) -> str:
    if not interval:
        return text
    low, high = interval
    return f"{text} ({digits(low, decimals)} to {digits(high, decimals)})"
