"""When exits pay: the gain of `small` over its dense twin by vocabulary, by the text it reads and by depth."""

from typing import Any

from docs.tables.table import Cell, Table, bracketed, digits, read, table
from nvium_core.evaluation.paper import SCALES
from nvium_core.evaluation.vocabulary import TOKENS
from nvium_core.training.recipes.tales import stories

SERIES = "vocabulary-small"
PAIR = "evaluation-stories"
"""The first of the bundled model's runs, which has a twin."""

PAPER_VOCABULARY = 32_000
GAIN = "gain, % (95%)"


@table
def vocabulary() -> Table:
    """A row for each of our sizes, a column for each seed; `stories`; and the paper's 24-layer models."""
    runs, seeds = unsteered()
    head = ["model", "vocabulary", "width over vocabulary", "mean depth", *(f"{GAIN}, seed {seed}" for seed in seeds)]
    sizes = sorted({run["vocab_size"] for run in runs})
    ours = [vocabulary_row([run for run in runs if run["vocab_size"] == size], seeds) for size in sizes]
    widths = sorted(width for layers, width in SCALES if layers == 24)
    others = [stories_vocabulary_row(), *map(paper_vocabulary_row, widths)]
    return head, [*ours, *([*row, *([""] * (len(seeds) - 1))] for row in others)]


def unsteered() -> tuple[list[dict[str, Any]], list[int]]:
    """The runs at β 0 that read as little text as most, and their seeds."""
    runs = [run for run in read(SERIES) if not run["asked_depth"] and run["training_tokens"] == TOKENS]
    return runs, sorted({run["seed"] for run in runs})


def vocabulary_row(runs: list[dict[str, Any]], seeds: list[int]) -> list[Cell]:
    first, of_seed = runs[0], {run["seed"]: run for run in runs}
    depth = sum(run["mean_depth"] for run in runs) / len(runs)
    gains = [gain(of_seed[seed]) if seed in of_seed else "" for seed in seeds]
    ratio = digits(first["width_over_vocabulary"], 3)
    return [f"`small`, 12 × {first['width']}, β 0", first["vocab_size"], ratio, depth, *gains]


@table
def vocabulary_bits() -> Table:
    """By how much the bits per character are below the twin's, a row for each vocabulary."""
    runs, seeds = unsteered()
    found = {(run["vocab_size"], run["seed"]): bits_below_twin(run) for run in runs}
    return ["vocabulary", *(f"fewer bits, %, seed {seed}" for seed in seeds)], [
        [size, *(found.get((size, seed)) for seed in seeds)] for size in sorted({size for size, _ in found})
    ]


def bits_below_twin(run: dict[str, Any]) -> float:
    return float(100 * (1 - run["bits_per_character"] / run["twin"]["bits_per_character"]))


@table
def tokens() -> Table:
    """The gain of `small` at β 0 by how much it has read, of the vocabularies that read more than others."""
    runs = [run for run in read(SERIES) if not run["asked_depth"]]
    longer = {run["vocab_size"] for run in runs if run["training_tokens"] > TOKENS}
    seeds = sorted({run["seed"] for run in runs})
    keys = sorted({(run["vocab_size"], run["training_tokens"]) for run in runs if run["vocab_size"] in longer})
    head = ["vocabulary", "tokens", "tokens a parameter", "mean depth", *(f"{GAIN}, seed {seed}" for seed in seeds)]
    return head, [
        tokens_row([run for run in runs if (run["vocab_size"], run["training_tokens"]) == key], seeds) for key in keys
    ]


def tokens_row(runs: list[dict[str, Any]], seeds: list[int]) -> list[Cell]:
    _, size, _, depth, *gains = vocabulary_row(runs, seeds)
    read_by_each = runs[0]["training_tokens"]
    return [size, f"{read_by_each / 1e6:.0f}M", digits(read_by_each / runs[0]["num_parameters"], 1), depth, *gains]


@table
def depths() -> Table:
    """The gain of `small` by the depth that it was steered to, of the seeds and the vocabulary that have been."""
    runs = read(SERIES)
    steered = {(run["vocab_size"], run["seed"]) for run in runs if run["asked_depth"]}
    rows = sorted(
        (run for run in runs if (run["vocab_size"], run["seed"]) in steered),
        key=lambda run: (run["seed"], -run["mean_depth"]),
    )
    return ["vocabulary", "seed", "steered to", "mean depth", "exits' shares", GAIN], map(depth_row, rows)


def depth_row(run: dict[str, Any]) -> list[Cell]:
    steered, depth = run["asked_depth"] or "β 0", digits(run["mean_depth"], 3)
    return [run["vocab_size"], run["seed"], steered, depth, shares(run["exit_shares"]), gain(run)]


def stories_vocabulary_row() -> list[Cell]:
    run, shape = read(PAIR), stories().shape
    ratio = digits(shape.width / shape.vocab_size, 3)
    return [f"`stories`, 12 × {shape.width}, steered", shape.vocab_size, ratio, run["mean_depth"], gain(run)]


def paper_vocabulary_row(width: int) -> list[Cell]:
    ratio = digits(width / PAPER_VOCABULARY, 3)
    return [f"the paper's 24 × {width}", PAPER_VOCABULARY, ratio, "", SCALES[24, width].perplexity_gain]


def shares(values: list[float] | tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}"[1:] for value in values)


def gain(run: dict[str, Any]) -> str:
    """With the interval over documents, where their losses were recorded."""
    return bracketed(digits(run["perplexity_gain_percent"], 2), run.get("perplexity_gain_interval_percent"), 2)
