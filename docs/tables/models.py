"""Models that others made, and what exits for them cost."""

from docs.tables.table import Cell, Table, digits, percent, read, table
from nvium_core.evaluation.paired import resolved


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


@table
def rounding() -> Table:
    names = {"tales-6m": "embedded", "smollm2": "SmolLM2-135M-Instruct"}
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


@table
def drafts() -> Table:
    found = read("drafts-smollm2")["exits"]
    head = ["exit after layer", "the rule accepts", "the race agrees", "one uniform agrees"]
    names = "speculative_sampling", "race", "one_uniform"
    return head, [[exit_["layer"], *(percent(exit_[name], 0) for name in names)] for exit_ in found]


@table
def lossless() -> Table:
    head = [
        "temperature",
        "dense, tokens/s",
        "lossless, tokens/s",
        "lossless over dense",
        "what costs and drafts allow",
    ]
    rates = "tokens_per_second_dense", "tokens_per_second_lossless"
    return head, [
        [
            digits(row["temperature"]),
            *(digits(row[rate], 1) for rate in rates),
            digits(row["lossless_over_dense"], 2),
            digits(row["limit"], 2),
        ]
        for row in read("drafts-smollm2")["rows"]
    ]
