"""What drafts gain where every token is the original's."""

from statistics import median
from typing import Any

from docs.tables.table import Cell, Table, digits, percent, read, table, verdict


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
def lossless_several() -> Table:
    """By processor time, which other programs on the core do not lengthen."""
    head = ["sequences", "temperature", "over dense", "its turns", "over itself without drafts", "its turns"]
    return [*head, "drafts", "right"], [
        [
            row["sequences"],
            digits(row["temperature"]),
            *by_processor(row["turns"], "dense"),
            *by_processor(row["turns"], "undrafted"),
            *(sum(row["drafts"].values()), percent(row["drafts_right"], 0)),
        ]
        for row in read("drafts-smollm2-several")["rows"]
    ]


def by_processor(turns: Any, other: str) -> tuple[str, str]:
    """Tokens per processor second with drafts over another's, turn by turn: the median, and the least and the most."""
    rates = {name: [turn["tokens"] / turn["processor_seconds"] for turn in turns[name]] for name in ("lossless", other)}
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    return digits(median(ratios), 2), f"{digits(min(ratios), 2)} to {digits(max(ratios), 2)}"


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
