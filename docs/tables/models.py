"""Models that others made: until they are ready, and what rounding their weights costs."""

from docs.tables.table import Cell, Table, digits, read, table
from nvium_core.evaluation.paired import resolved


@table
def ready() -> Table:
    head = ["", "first, s", "warm, s", "processor, s", "own memory, GB", "resident, GB", "peak, GB"]
    rows = [
        [
            row["name"],
            digits(row["first"]["seconds"], 1),
            digits(warm["seconds"], 1),
            digits(warm["processor"], 1),
            *(digits(warm[name] / 1e9, 2) for name in ("own", "resident", "peak")),
        ]
        for row in read("ready")["rows"]
        for warm in [row["warm"]]
    ]
    return head, rows


@table
def rounding() -> Table:
    names = {"tales-6m": "tales-6m", "smollm2": "SmolLM2-135M-Instruct"}
    head = ["", "weights", "perplexity unrounded", "perplexity", "price, with its interval"]
    rows: list[list[Cell]] = []
    for name, words in names.items():
        for kind in ("q8", "q4"):
            found = read(f"rounding-{name}-{kind}")
            price, bounds = found["rounding"]["price_percent"], found["rounding"]["price_interval_percent"]
            perplexities = (found["rounding"]["unrounded_perplexity"], found["perplexity"])
            rows.append(
                [words, kind, *(digits(each, 2) for each in perplexities), resolved(f"{price:.2f}%", bounds, nothing=0)]
            )
    return head, rows
