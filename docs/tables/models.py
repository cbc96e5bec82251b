"""Models that others made, and what exits for them cost."""

from collections.abc import Sequence
from typing import Any

from docs.tables.table import Cell, Table, digits, percent, read, table, verdict
from nvium_core.evaluation.paired import resolved


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


ASKED_PRICES = {0.9: 0, 0.85: 2, 0.8: 4}
"""Of text such as was learnt from, percent at most, by depth."""

ASKED_EQUAL = {0.85: 0.9}
"""The share of positions, at least."""


@table
def retrofit_curve() -> Table:
    texts = read("retrofit-curve-smollm2")["texts"]
    head = [
        "depth",
        "asked",
        "price, conversations",
        "price, tales",
        "asked",
        "same argmax, conversations",
        "same, tales",
    ]
    pairs = zip(*(text["points"][1:] for text in (texts["conversations"], texts["tales"])), strict=True)
    return head, [curve_row(own, other) for own, other in pairs]


def curve_row(own: Any, other: Any) -> list[Cell]:
    depth = own["asked_depth"]
    price, equal = ASKED_PRICES.get(depth), ASKED_EQUAL.get(depth)
    met_price = f"at most {price}%: {verdict(own['price_percent'] <= price)}" if price is not None else None
    met_equal = f"at least {percent(equal, 0)}: {verdict(own['same_argmax'] >= equal)}" if equal else None
    prices = (
        f"{digits(each['price_percent'], 1)}%, {between(each['price_interval_percent'])}" for each in (own, other)
    )
    shares = (
        f"{percent(each['same_argmax'])}, {between([100 * share for share in each['same_argmax_interval']])}"
        for each in (own, other)
    )
    return [digits(depth, 2), met_price, *prices, met_equal, *shares]


BACKBONES = {"frozen": "retrofit-curve-smollm2-two-exits", "low-rank": "retrofit-curve-smollm2-low-rank"}


@table
def retrofit_backbone() -> Table:
    texts = {name: read(file)["texts"] for name, file in BACKBONES.items()}
    kinds = "conversations", "tales"
    head = ["depth", "asked", *(f"{kind}, {name}" for kind in kinds for name in texts)]
    points = [texts[name][kind]["points"][1:] for kind in kinds for name in texts]
    return head, [backbone_row(each) for each in zip(*points, strict=True)]


def backbone_row(points: Sequence[Any]) -> list[Cell]:
    """Prices at one depth, those of a low-rank backbone's conversations beside what was asked."""
    depth = points[0]["asked_depth"]
    price = ASKED_PRICES.get(depth)
    asked = f"at most {price}%: {verdict(points[1]['price_percent'] <= price)}" if price is not None else None
    prices = (f"{digits(each['price_percent'], 1)}%, {between(each['price_interval_percent'])}" for each in points)
    return [digits(depth, 2), asked, *prices]


def between(bounds: Any) -> str:
    return " to ".join(digits(bound, 1) for bound in bounds)


@table
def retrofit_speed() -> Table:
    head = ["depth", "over dense, the median turn", "its turns", "what costs allow", "share of it", "asked"]
    return head, [retrofit_speed_row(row) for row in read("exits-smollm2")["rows"]]


def retrofit_speed_row(row: Any) -> list[Cell]:
    """Met or not only where all turns agree."""
    ours, dense = row["turns"].values()
    ratios = [own / other for own, other in zip(ours, dense, strict=True)]
    least, most = min(ratios), max(ratios)
    asked = 0.9 * row["limit"]
    found = "not resolved" if least < asked <= most else verdict(least >= asked)
    return [
        digits(row["depth"], 2),
        digits(row["ratio"], 2),
        f"{digits(least, 2)} to {digits(most, 2)}",
        digits(row["limit"], 2),
        digits(row["share_of_limit"], 2),
        f"at least .9: {found}",
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


@table
def drafts() -> Table:
    found = read("drafts-smollm2")["exits"]
    head = ["exit after layer", "the rule accepts", "the race agrees", "one uniform agrees"]
    names = "speculative_sampling", "race", "one_uniform"
    return head, [[exit_["layer"], *(percent(exit_[name], 0) for name in names)] for exit_ in found]


@table
def lossless() -> Table:
    head = [
        "",
        "temperature",
        "over dense, the median question",
        "asked",
        "all questions",
        "what costs and drafts allow",
        "share of it",
        "asked",
        "tokens a round",
        "drafts of exits",
        "of the drafter",
        "of lookup",
        "right",
    ]
    models = {"with exits and a drafter": "drafts-smollm2", "as released": "drafts-smollm2-dense"}
    return head, [lossless_row(name, row) for name, file in models.items() for row in read(file)["rows"]]


def lossless_row(name: str, row: Any) -> list[Cell]:
    in_all, by = row["lossless_over_dense_in_all"], row["drafts"]
    share = in_all / row["limit"]
    asked: list[Cell] = [None, None]
    if "drafter" in by:
        met = row["lossless_over_dense"] >= 1.15, share >= 0.9
        asked = [f"at least {least}: {verdict(each)}" for least, each in zip((1.15, 0.9), met, strict=True)]
    return [
        name,
        digits(row["temperature"]),
        digits(row["lossless_over_dense"], 2),
        asked[0],
        digits(in_all, 2),
        digits(row["limit"], 2),
        digits(share, 2),
        asked[1],
        digits(row["tokens_a_round"], 2),
        sum(number for source, number in by.items() if source.startswith("exit")),
        by.get("drafter"),
        by["text"],
        percent(row["drafts_right"], 0),
    ]


@table
def lookup() -> Table:
    found = read("lookup-smollm2")
    return ["drafts in a row", "over llama.cpp without, the median question", "all questions", "same answers"], [
        [
            row["drafts"],
            row["over_plain"],
            row["over_plain_in_all"],
            f"{row['equal_answers']} of {found['repeats']}",
        ]
        for row in found["rows"]
    ]
