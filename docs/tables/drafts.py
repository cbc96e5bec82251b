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
    least = 1.15 if "drafter" in by else 1
    asked = f"at least {least}: {verdict(row['lossless_over_dense'] >= least)}"
    return [
        name,
        digits(row["temperature"]),
        digits(row["lossless_over_dense"], 2),
        asked,
        digits(in_all, 2),
        digits(row["limit"], 2),
        digits(share, 2),
        f"at least 0.9: {verdict(share >= 0.9)}",
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
    return [*head, "asked", "drafts", "right"], [
        [
            row["sequences"],
            digits(row["temperature"]),
            *median_and_range(over(row["turns"], "dense")),
            *median_and_range(found := over(row["turns"], "undrafted")),
            f"at least 1: {never_slower(found)}",
            *(sum(row["drafts"].values()), percent(row["drafts_right"], 0)),
        ]
        for row in read("drafts-smollm2-several")["rows"]
    ]


def over(turns: Any, other: str) -> list[float]:
    """Tokens per processor second with drafts over another's, turn by turn."""
    rates = {name: [turn["tokens"] / turn["processor_seconds"] for turn in turns[name]] for name in ("lossless", other)}
    return [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]


def median_and_range(ratios: list[float]) -> tuple[str, str]:
    return digits(median(ratios), 2), f"{digits(min(ratios), 2)} to {digits(max(ratios), 2)}"


def never_slower(ratios: list[float]) -> str:
    """To the two digits that are shown."""
    rounded = [round(ratio, 2) for ratio in ratios]
    return "not resolved" if min(rounded) < 1 <= max(rounded) else verdict(min(rounded) >= 1)


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
