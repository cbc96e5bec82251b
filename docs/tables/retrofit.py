"""What exits for a model that has none cost and save."""

from typing import Any

from docs.tables.table import Cell, Table, digits, percent, read, table, verdict


@table
def retrofit() -> Table:
    found = read("retrofit-smollm2")["measured"]["conversations"]
    depth = found["exits"][-1]["layer"]
    head = ["", "depth", "perplexity", "KL to the original, nats", "overlap with it", "tokens leave"]
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
def retrofit_times() -> Table:
    found = read("retrofit-walk")
    head = ["tokens trained on", "reading the text, s", "least squares and training, s", "measuring, s"]
    seconds = (digits(found["seconds"][lap]) for lap in ("text", "training", "measuring"))
    return head, [[found["tokens"], *seconds]]


KINDS = "conversations", "tales"

ASKED_PRICES = {0.9: 0, 0.85: 2, 0.8: 4}
"""Of text such as was learnt from, percent at most, by depth."""

ASKED_EQUAL = {0.85: 0.9}
"""Of the same, the share of positions with the original's argmax, at least, by depth."""


@table
def retrofit_curve() -> Table:
    return curve_of("retrofit-curve-smollm2", *KINDS)


@table
def retrofit_curve_tales() -> Table:
    return curve_of("retrofit-curve-smollm2-tales", *reversed(KINDS))


def curve_of(file: str, own_kind: str, other_kind: str) -> Table:
    """Of text such as was learnt from, and of another."""
    points = points_of(file)
    prices = "asked", f"price, {own_kind}", f"price, {other_kind}"
    equals = "asked", f"same argmax, {own_kind}", f"same, {other_kind}"
    return ["depth", *prices, *equals], [
        [
            digits(own["asked_depth"], 2),
            *(asked_price(own), price(own), price(other)),
            *(asked_equal(own), equal(own), equal(other)),
        ]
        for own, other in zip(points[own_kind], points[other_kind], strict=True)
    ]


@table
def retrofit_backbone() -> Table:
    frozen = points_of("retrofit-curve-smollm2-two-exits")
    low_rank = points_of("retrofit-curve-smollm2-low-rank")
    head = ["depth", "asked", *(f"{kind}, {name}" for kind in KINDS for name in ("frozen", "low-rank"))]
    columns = [texts[kind] for kind in KINDS for texts in (frozen, low_rank)]
    return head, [
        [digits(points[1]["asked_depth"], 2), asked_price(points[1]), *map(price, points)]
        for points in zip(*columns, strict=True)
    ]


def points_of(file: str) -> dict[str, Any]:
    """Of each kind of text a point for every asked depth. A file's first point is of the routers as they are."""
    texts = read(file)["texts"]
    return {kind: texts[kind]["points"][1:] for kind in KINDS}


def price(point: Any) -> str:
    return f"{digits(point['price_percent'], 1)}%, {between(point['price_interval_percent'])}"


def equal(point: Any) -> str:
    bounds = [100 * share for share in point["same_argmax_interval"]]
    return f"{percent(point['same_argmax'])}, {between(bounds)}"


def asked_price(point: Any) -> Cell:
    most = ASKED_PRICES.get(point["asked_depth"])
    return None if most is None else f"at most {most}%: {verdict(point['price_percent'] <= most)}"


def asked_equal(point: Any) -> Cell:
    least = ASKED_EQUAL.get(point["asked_depth"])
    return None if least is None else f"at least {percent(least, 0)}: {verdict(point['same_argmax'] >= least)}"


def between(bounds: Any) -> str:
    return " to ".join(digits(bound, 1) for bound in bounds)


@table
def retrofit_speed() -> Table:
    head = ["sequences", "depth", "over dense, the median turn", "its turns", "what costs allow", "share of it"]
    return [*head, "asked"], map(retrofit_speed_row, read("exits-smollm2-tales")["rows"])


def retrofit_speed_row(row: Any) -> list[Cell]:
    """Met or not only where all turns agree. Of several sequences a limit is not calculated."""
    ours, dense = row["turns"].values()
    ratios = [own / other for own, other in zip(ours, dense, strict=True)]
    least, most = min(ratios), max(ratios)
    limit = row.get("limit")
    words, asked = ("at least .9", 0.9 * limit) if limit else ("over dense at least 1", 1.0)
    found = "not resolved" if least < asked <= most else verdict(least >= asked)
    return [
        row["sequences"],
        digits(row["depth"], 2),
        digits(row["ratio"], 2),
        f"{digits(least, 2)} to {digits(most, 2)}",
        limit and digits(limit, 2),
        limit and digits(row["share_of_limit"], 2),
        f"{words}: {found}",
    ]


@table
def retrofit_answers() -> Table:
    found = read("retrofit-curve-smollm2")["answers"]
    asked = len(found["questions"])
    rows: list[list[Cell]] = [["the original", None, f"{found['original']['right']} of {asked}"]]
    rows += [
        [f"depth {digits(row['depth'], 2)}", f"{row['equal']} of {asked}", f"{row['right']} of {asked}"]
        for row in found["mixture"]
    ]
    return ["", "the original's answer, word for word", "has the right word"], rows
