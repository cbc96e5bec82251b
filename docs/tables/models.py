"""Models that others made, and what exits for them cost."""

from docs.tables.table import Table, digits, percent, read, table


@table
def retrofit() -> Table:
    found = read("retrofit-smollm2")["measured"]
    depth = found["exits"][-1]["layer"]
    head = ["", "depth", "perplexity", "KL to the last, nats", "drafts it would accept", "tokens leave"]
    rows = [
        [
            f"exit after layer {exit_['layer']}",
            digits(exit_["layer"] / depth, 2),
            digits(exit_["perplexity"], 2),
            digits(exit_["kl"], 2),
            percent(exit_["overlap"], 0),
            percent(exit_["share"], 0),
        ]
        for exit_ in found["exits"]
    ]
    price = f"{digits(found['perplexity'], 2)} ({percent(found['price'])} ± {percent(found['price_error'])})"
    return head, [*rows, ["mixture", digits(found["depth"], 3), price, None, None, None]]


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
