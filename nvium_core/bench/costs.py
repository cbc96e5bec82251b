"""What a Step of each block costs by its rows, as measured; the file serves `nvium plan --costs`."""

from rich.table import Table

from nvium_core.bench.harness import Figures, Subject


def measure(subject: Subject) -> Figures:
    """Seconds by block and rows, as `StepCosts.from_dict` reads them, and the fit a_k + b_k·r in milliseconds."""
    costs = subject.engine().calibrate()
    return {
        **costs.as_dict(),
        "fixed_ms": [1000 * seconds for seconds in costs.fixed],
        "per_row_ms": [1000 * seconds for seconds in costs.per_row],
    }


def table(figures: Figures) -> Table:
    blocks = figures["blocks"]
    columns = "rows", *(f"block {number}" for number in range(1, len(blocks) + 1))
    result = Table(*columns, caption="Milliseconds, and the fit of fixed and per row.")
    for rows in blocks[0]:
        result.add_row(rows, *(f"{1000 * block[rows]:.3f}" for block in blocks))
    for name in "fixed", "per_row":
        result.add_row(name.replace("_", " "), *(f"{value:.3f}" for value in figures[f"{name}_ms"]))
    return result
