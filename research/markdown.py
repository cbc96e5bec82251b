"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from nvium_core.bench.harness import shown

Row = Sequence[object]


def table(columns: Row, rows: Iterable[Row]) -> str:
    """Render a table. Floats get four significant digits, and None becomes a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join("–" if value is None else shown(value) for value in line) + " |" for line in lines
    )
