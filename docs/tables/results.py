"""The quality of the models trained here, beside the paper's figures."""

import json
import math
from typing import Any

import numpy as np

from docs.tables.table import ROOT, Cell, Table, bracketed, digits, percent, read, table, verdict
from docs.tables.vocabulary import GAIN, PAIR, SERIES, gain, shares, unsteered
from nvium_core.evaluation.latency import DENSE, FULL_DEPTH, OURS
from nvium_core.evaluation.origin import numbers_of_prompts
from nvium_core.evaluation.paired import interval
from nvium_core.evaluation.paper import EXIT_PERPLEXITIES, EXIT_SHARES, PARETO, PERPLEXITY, SCALES

EMBEDDED, BEFORE = "evaluation-stories-9m", "evaluation-tales-chat"
"""The bundled model, and the one of 2,048 tokens that was bundled before."""

HELD_OUT = {"stories-9m": EMBEDDED, "tales-6m": BEFORE}
"""Models that have been evaluated on the held-out tales, and their evaluation on the validation text."""

SPEC_BENCH = "spec-bench-stories-9m"
BETAS, EXITS, PLACES = ("β 0, .1, .2, .3, .4", "2, 3, 4, 6, 8, 12 exits", "early exit at 2, 6, 10, 14, 18, 22")
SMALL = {
    "small-beta-0": ("β 0", BETAS, 0),
    "small": ("`small`, β .02", BETAS, 1),
    "small-beta-0.04": ("β .04", BETAS, 2),
    "small-beta-0.08": ("β .08", BETAS, 4),
    "small-exits-2": ("2 exits", EXITS, 0),
    "small-exits-6": ("6 exits", EXITS, 3),
    "small-exits-12": ("12 exits", EXITS, 5),
    "small-exit-at-1": ("one early exit, β 0, after layer 1 of 12", PLACES, 0),
    "small-exit-at-5": ("after layer 5", PLACES, 2),
    "small-exit-at-9": ("after layer 9", PLACES, 4),
}
"""A run's setting, and the paper's corresponding point. The paper's β is five times ours at the same depth."""


@table
def embedded() -> Table:
    head = ["model", "parameters", "tokens", "perplexity", "bits per character", "mean depth", "exits' shares"]
    head += ["dense baseline's perplexity", GAIN]
    ours = {
        "`stories`": PAIR,
        "`stories-chat`": "evaluation-stories-chat",
        "`stories-asked-3`": "evaluation-stories-asked",
        "the mean of this and `stories-chat`": "evaluation-stories-mean",
        "`stories-asked-5`": "evaluation-stories-asked-5",
        "`stories-9m`, the mean of `stories-asked-4` and `-5`, bundled": EMBEDDED,
        "`tales-chat`, bundled before as `tales-6m`": BEFORE,
    }
    return head, [embedded_row(words, read(name)) for words, name in ours.items()]


def embedded_row(words: str, run: dict[str, Any]) -> list[Cell]:
    return [
        words,
        run["num_parameters"],
        tokens_read(run),
        run["perplexity"],
        digits(run["bits_per_character"], 3),
        digits(run["mean_depth"], 3),
        shares(run["exit_shares"]),
        run["twin"]["perplexity"] if "twin" in run else None,
        gain(run) if "twin" in run else None,
    ]


def tokens_read(run: dict[str, Any]) -> str | None:
    if not run["training_tokens"]:
        return None
    read = f"{run['training_tokens'] / 1e6:.1f}M"
    return f"{read}, {run['training_tokens'] / run['num_parameters']:.1f} a parameter" if "twin" in run else read


@table
def held_out() -> Table:
    """Tales that no model was trained on. Fewer bits than the last one's, as tokens differ."""
    runs = [read(f"evaluation-{name}-held-out") for name in HELD_OUT]
    head = ["model", "tales", "tokens", "bits per character", "fewer bits than `tales-6m`, % (95%)"]
    head += ["of the validation text", "mean depth", "exits' shares"]
    return head, [held_out_row(run, runs[-1]) for run in runs]


def held_out_row(run: dict[str, Any], other: dict[str, Any]) -> list[Cell]:
    return [
        f"`{run['model']}`",
        run["text"]["num_documents"],
        run["num_tokens"],
        digits(run["bits_per_character"], 3),
        None if run is other else fewer_bits(run, other),
        digits(read(HELD_OUT[run["model"]])["bits_per_character"], 3),
        digits(run["mean_depth"], 3),
        shares(run["exit_shares"]),
    ]


def fewer_bits(run: dict[str, Any], other: dict[str, Any]) -> str:
    """Of the same documents, whose tokens may differ."""
    ours, theirs = (np.asarray(each["document_losses"]) for each in (run, other))
    bounds = interval([len(ours)], lambda samples: 100 * (1 - ours[samples[0]].sum(1) / theirs[samples[0]].sum(1)))
    return bracketed(digits(100 * (1 - ours.sum() / theirs.sum()), 1), list(bounds) if bounds else None, 1)


@table
def reading() -> Table:
    head = [
        "model",
        "stories",
        "end",
        "keep their hero",
        "repeat a sentence",
        "words, median",
        "asked",
        "keep to subject",
    ]
    names = ("num_stories", "end", "keep_their_hero", "repeat_a_sentence", "median_words", "num_asked")
    return head, [
        [f"`{run['model']}`", *(digits(run[name]) for name in names), run["keep_to_their_subject"]]
        for run in read("stories")
    ]


@table
def before() -> Table:
    head = ["model", "parameters", "tokens", "perplexity", "dense baseline", GAIN, "mean depth", "exits' shares"]
    head += ["theoretical speed-up, %", "measured, %"]
    ours = {"`tales-chat`": BEFORE, "`tales-again`, before it learnt to chat": "evaluation-tales-again"}
    rows: list[list[Cell]] = [row_with_speed(words, read(name)) for words, name in ours.items()]
    return head, [*rows, *(paper_row(*shape) for shape in ((24, 128), (12, 768), (24, 768)))]


def row_with_speed(words: str, run: dict[str, Any]) -> list[Cell]:
    return [
        words,
        run["num_parameters"],
        f"{run['training_tokens'] / 1e6:.1f}M",
        run["perplexity"],
        run["twin"]["perplexity"],
        gain(run),
        digits(run["mean_depth"], 3),
        shares(run["exit_shares"]),
        digits(run["theoretical_speed_up_percent"], 1),
        speed_up(run),
    ]


def speed_up(run: dict[str, Any]) -> str:
    """With the interval over pairs of answers, or over categories of prompts where answers were not recorded."""
    bounds = run.get("speed_up_interval_percent") or interval_of_categories(run.get("latency", {}))
    return bracketed(digits(run["speed_up_percent"], 1), bounds, 1)


def interval_of_categories(latency: dict[str, Any]) -> list[float] | None:
    times = [of["milliseconds"] for of in latency.get("categories", {}).values()]
    if not times:
        return None
    ratios = np.array([of[DENSE] / of[OURS] for of in times])
    bounds = interval([len(ratios)], lambda samples: ratios[samples[0]].mean(1))
    return [100 * (bound - 1) for bound in bounds] if bounds else None


def paper_row(layers: int, width: int) -> list[Cell]:
    scale = SCALES[layers, width]
    perplexities = [digits(math.exp(loss), 1) for loss in (scale.loss, scale.dense_loss)]
    rest = [digits(scale.theoretical_speed_up, 1), digits(scale.speed_up, 1)]
    size = f"{scale.million_parameters:g}M"
    routed = shares(EXIT_SHARES) if (layers, width) == (24, 768) else ""
    return [
        f"the paper's {layers} × {width}",
        size,
        "20 a parameter",
        *perplexities,
        scale.perplexity_gain,
        "",
        routed,
        *rest,
    ]


@table
def targets() -> Table:
    pair, run, [told, *_], [fresh] = read(PAIR), read(EMBEDDED), read("stories"), read("stories-fresh")
    bits, depth, least = run["bits_per_character"], pair["mean_depth"], min(run["exit_shares"])
    made = json.loads((ROOT / "data" / "tales" / "tales.txt.json").read_text(encoding="utf-8"))["num_tokens"]
    rows = [
        ("`stories`, perplexity below its dense baseline's, %, one seed", "at least 2", gain(pair), gains(pair)),
        ("`stories`, mean depth", "at most 0.75", digits(depth, 3), depth <= 0.75),
        *small_targets(),
        ("bundled, bits per character of the validation text", "at most 1.425", digits(bits, 3), bits <= 1.425),
        ("bundled, smallest share of an exit", "at least 3%", percent(least), least >= 0.03),
        ("bundled, answers that keep to their subject", *kept_subjects(told)),
        ("bundled, answers on subjects by which no model was chosen that keep to them", *kept_subjects(fresh)),
        ("tokens of made tales", "10M", f"{made / 1e6:.2f}M", made >= 10e6),
    ]
    return ["", "target", "measured (95%)", ""], [
        [what, asked, found, verdict(is_met)] for what, asked, found, is_met in rows
    ]


Target = tuple[str, str, str, bool]
"""What, what was asked for, what was measured, and whether it is met."""


def small_targets() -> list[Target]:
    """Of the largest vocabulary, every seed."""
    runs = [run for run in unsteered()[0] if run["vocab_size"] == max(run["vocab_size"] for run in read(SERIES))]
    runs = sorted(runs, key=lambda run: run["seed"])
    depths = [run["mean_depth"] for run in runs]
    name = f"`small` with {runs[0]['vocab_size']:,} tokens, {len(runs)} seeds"
    below = f"{name}, perplexity below its dense baseline's, %"
    return [
        (below, "at least 2", ", ".join(map(gain, runs)), all(map(gains, runs))),
        (f"{name}, mean depth", "at most 0.75", ", ".join(digits(each, 3) for each in depths), max(depths) <= 0.75),
    ]


def gains(run: dict[str, Any]) -> bool:
    """By two percent, with an interval above zero."""
    return bool(run["perplexity_gain_percent"] >= 2 and run["perplexity_gain_interval_percent"][0] > 0)


def kept_subjects(told: dict[str, Any]) -> tuple[str, str, bool]:
    """With the interval over subjects."""
    asked, kept = told["num_asked"], told["keep_to_their_subject"]
    is_kept = np.arange(asked) < kept
    bounds = interval([asked], lambda samples: is_kept[samples[0]].sum(1))
    return "at least 70 of 100", bracketed(digits(kept), list(bounds) if bounds else None, 0), kept >= 0.7 * asked


@table
def exits() -> Table:
    run = read(BEFORE)
    ours = [digits(value, 1) for value in run["exit_perplexities"]]
    theirs = [digits(value, 1) for value in EXIT_PERPLEXITIES]
    head = [
        "perplexity of",
        *(f"exit {number}" for number in range(1, len(ours) + 1)),
        "the mixture",
        "an oracle router",
    ]
    mixture = [digits(run["perplexity"], 1), digits(run["oracle_perplexity"], 1)]
    return head, [["`tales-6m`", *ours, *mixture], ["the paper's 24 × 768", *theirs, digits(PERPLEXITY, 1), ""]]


@table
def positions() -> Table:
    run = read(BEFORE)
    pairs = zip(run["by_position"], run["twin"]["by_position"], strict=True)
    return ["positions", "tokens", "ln p of the mixture less ln p of the baseline"], [
        [f"{ours['first']}–{ours['last']}", ours["num_tokens"], digits(ours["mean_logprob"] - twins["mean_logprob"], 4)]
        for ours, twins in pairs
    ]


@table
def latency() -> Table:
    found = read(BEFORE)["latency"]["categories"]
    head = ["Spec-Bench category", "early exits, ms a token", "at full depth", "dense baseline"]
    names = ("early exits", "full depth", "dense")
    return head, [[name, *(of["milliseconds"][kind] for kind in names)] for name, of in found.items()]


@table
def spec_bench() -> Table:
    """Both protocols beside each other; below, our speed over the others'."""
    found = read(SPEC_BENCH)
    own, papers = found["latency"], found["latency_as_paper"]
    names = (OURS, FULL_DEPTH, DENSE)
    head = ["ms a token", *(f"our way, {name}" for name in names), *(f"the paper's way, {name}" for name in names)]
    rows: list[list[Cell]] = [
        [
            category,
            *(of["milliseconds"][name] for name in names),
            *(1000 / papers["tokens_per_second"][category][name] for name in names),
        ]
        for category, of in own["categories"].items()
    ]
    mean = ["over early exits, mean over categories", *over(own, "ratio"), *over(papers, "category_ratio")]
    together = ["over early exits, all tokens together", *[""] * 3, *over(papers, "ratio")]
    tokens = [papers["tokens"][name] / sum(numbers_of_prompts(found).values()) / papers["trials"] for name in names]
    lengths = ["tokens an answer", *[own["max_new_tokens"]] * 3, *(digits(each) for each in tokens)]
    return head, [*rows, mean, together, lengths]


def over(measured: dict[str, Any], kind: str) -> list[str]:
    """Nothing over itself, then with intervals."""
    ratios, bounds = measured[f"{kind}s"], measured[f"{kind}_intervals"]
    return ["", *(bracketed(digits(ratios[name], 2), bounds[name], 2) for name in (FULL_DEPTH, DENSE))]


@table
def sweep() -> Table:
    head = ["model", "perplexity", "mean depth", "exits' shares", "the paper's gain, %", "the paper's speed-up, %"]
    return head, [sweep_row(name, *SMALL[name]) for name in SMALL]


def sweep_row(name: str, words: str, series: str, place: int) -> list[Cell]:
    run, point = read(f"evaluation-{name}"), PARETO[series][place]
    ours = [run["perplexity"], digits(run["mean_depth"], 3), shares(run["exit_shares"])]
    return [words, *ours, point.perplexity_gain, digits(point.speed_up, 1)]


@table
def methods() -> Table:
    files = ("small", "small-beta-0.04", "small-calm", "small-layerskip")
    runs = [run for name in files for run in as_list(read(f"evaluation-{name}"))]
    return ["model", "perplexity", "mean depth", "speed-up, % (95%)"], [
        [run["model"], run["perplexity"], depth_of(run), resolved_speed_up(run)] for run in runs
    ]


def resolved_speed_up(run: dict[str, Any]) -> str | None:
    return speed_up(run) if "speed_up_interval_percent" in run else None


def as_list(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def depth_of(run: dict[str, Any]) -> str | None:
    return digits(run["mean_depth"], 3) if "mean_depth" in run else None


@table
def greedy() -> Table:
    run = read("evaluation-tales-chat-greedy")
    head = ["tokens at temperature 0", "certain before the last exit", "mean depth", "are the argmax of π_mix"]
    early, argmax = percent(run["greedy_early_share"]), percent(run["greedy_agreement"], 0)
    return head, [[run["greedy_num_tokens"], early, digits(run["greedy_mean_depth"], 3), argmax]]


@table
def chat() -> Table:
    run = read("chat-tales-6m")
    head = ["conversations", "reference answers, nats a token", "own answers that end", "their tokens, on average"]
    ended = percent(run["ended_share"], 0)
    return head, [[run["num_conversations"], run["answer_loss"], ended, digits(run["sampled_tokens"])]]


@table
def temperature() -> Table:
    found = read("temperature-tales-6m")["temperatures"]
    head = ["", "temperature", "mean log π_mix", "entropy", "repeated 4-grams", "distinct words"]
    rows = [("human text", "", found["people"])]
    rows += [(f"`{row['sampling']}`", f"{row['temperature']:g}", row) for row in found["rows"]]
    return head, [
        [
            who,
            at,
            of["mean_logprob"],
            of["entropy"],
            percent(of["repeated_grams"]),
            percent(of["distinct_words"], 0),
        ]
        for who, at, of in rows
    ]


@table
def heads() -> Table:
    ways = read("heads-24x768-float32")["ways"]
    names = {"held": "logits held", "chunked": "logits in chunks"}
    body = [
        [words, digits(ways[key]["peak_bytes"] / 1e6), digits(ways[key]["seconds"], 1)] for key, words in names.items()
    ]
    return ["24 × 768, four exits, 1,024 tokens", "peak, MB", "seconds"], body
