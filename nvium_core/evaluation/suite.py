"""Computes, compares and shows the figures of `nvium evaluate`: a line, a table of the distributions, and details.

A comparison of the perplexity of two models on the same documents has a paired bootstrap interval of 95%. Documents of
one work, such as the chapters of a book, are resampled together. A difference whose interval contains zero is called
level.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import count, numbers, shown, subject_of
from nvium_core.engine.errors import require_threshold
from nvium_core.evaluation import perplexity
from nvium_core.evaluation.perplexity import EvaluationError
from nvium_core.loading import LoadedModel
from nvium_core.model.config import exit_places
from nvium_core.model.stored import materialise
from nvium_core.training.caveats import caveats, warnings
from nvium_core.training.data.texts import END_OF_TEXT

RESAMPLES = 2000
MIN_PAIRS = 3  # fewer pairs have no interval

Interval = tuple[float, float]

Sample = NDArray[np.int64]
"""Bootstrap samples of a group of pairs: indices of the pairs that are drawn, [RESAMPLES, number of pairs]."""


def interval(counts: Sequence[int], statistic: Callable[[list[Sample]], NDArray[np.float64]]) -> Interval | None:
    """Return the 95% bootstrap interval of a statistic. Return None if a group has fewer than `MIN_PAIRS` pairs.

    counts: number of pairs in each group.
    statistic: takes one `Sample` per group, returns RESAMPLES values.
    """
    if min(counts) < MIN_PAIRS:
        return None
    rng = np.random.default_rng(0)
    found = statistic([rng.integers(0, count, (RESAMPLES, count)) for count in counts])
    low, high = np.percentile(found, (2.5, 97.5)).tolist()
    return low, high


def perplexity_gain(ours: Figures, dense: Figures) -> Figures:
    """Return by how many percent our perplexity is below the dense model's, with a confidence interval and caveats."""
    found = None
    if ours.get("document_tokens") == dense.get("document_tokens") and "document_losses" in dense:
        works = ours.get("document_works")
        tokens = by_work(dense["document_tokens"], works)
        lead = by_work(np.asarray(dense["document_losses"]) - np.asarray(ours["document_losses"]), works)
        found = interval(
            [len(tokens)],
            lambda samples: 100 * (1 - np.exp(-lead[samples[0]].sum(1) / tokens[samples[0]].sum(1))),
        )
    return {
        "perplexity_gain_percent": 100 * (1 - ours["perplexity"] / dense["perplexity"]),
        "perplexity_gain_interval_percent": found and list(found),
        "caveats": caveats({**ours, "twin": dense}),
    }


def by_work(by_document: Sequence[float] | NDArray[np.float64], works: Sequence[str] | None) -> NDArray[np.float64]:
    """Sum values over the documents of each work. If `works` is None, each document is a work."""
    values = np.asarray(by_document, dtype=np.float64)
    if works is None:
        return values
    _, numbers = np.unique(np.asarray(works), return_inverse=True)
    return np.bincount(numbers, weights=values).astype(np.float64)


def perplexity_price(ours: Figures, other: Figures) -> Figures:
    """Return by how many percent our perplexity is above the other model's, with a confidence interval."""
    gain = perplexity_gain(ours, other)
    bounds = gain["perplexity_gain_interval_percent"]
    return {
        "price_percent": -gain["perplexity_gain_percent"],
        "price_interval_percent": bounds and [-bound for bound in reversed(bounds)],
    }


def with_interval(value: str, bounds: Sequence[float] | None, level: float) -> str:
    """Format a value and its interval. Add ": level" if `level`, the value for no difference, is in the interval."""
    if not bounds:
        return value
    low, high = bounds
    return f"{value} ({low:.3g} to {high:.3g}{': level' if low <= level <= high else ''})"


def evaluate(
    loaded: LoadedModel,
    documents: Sequence[str],
    *,
    twin: LoadedModel | None = None,
    thresholds: Sequence[float] = (),
) -> Figures:
    """Compute all figures, as JSON values. Raise `EvaluationError` if the twin does not match.

    twin: a dense model to compare with.
    thresholds: evaluate `sampling: threshold` at these too.
    """
    materialise(loaded.model)
    if twin:
        materialise(twin.model)
        check_dense(loaded, twin)
    figures = description(loaded) | {"text": digest(documents)}
    figures |= perplexity.evaluate(loaded.model, loaded.tokenizer, documents, thresholds)
    if twin:
        dense = twin_figures(twin, documents)
        figures |= {"twin": dense, **perplexity_gain(figures, dense)}
    return figures | {"caveats": caveats(figures)}


def parse_thresholds(text: str | None) -> Sequence[float]:
    """Parse thresholds separated by commas. Raise `InvalidRequest` for anything but finite numbers above 0."""
    found = numbers(text, "thresholds") if text else ()
    for each in found:
        require_threshold(each, "thresholds")
    return found


def check_dense(loaded: LoadedModel, twin: LoadedModel) -> None:
    if twin.model.config.num_exits > 1:
        raise EvaluationError(f"--twin: {twin.name} is not a dense model; it has early exits")
    if twin.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise EvaluationError(f"--twin: {twin.name} has another tokenizer, so the perplexities cannot be compared")


def digest(documents: Sequence[str]) -> Figures:
    """Return a digest of the text that does not depend on its file format."""
    text = f"\n{END_OF_TEXT}\n".join(documents).encode()
    return {"sha256": hashlib.sha256(text).hexdigest(), "num_documents": len(documents)}


def description(loaded: LoadedModel) -> Figures:
    config = loaded.model.config
    return {
        **subject_of(loaded).as_dict(),
        "num_layers": config.num_hidden_layers,
        "num_loops": config.num_loops,
        "width": config.hidden_size,
        "exit_layers": config.exit_layers,
    }


def twin_figures(twin: LoadedModel, documents: Sequence[str]) -> Figures:
    quality = perplexity.evaluate(twin.model, twin.tokenizer, documents)
    kept = ("perplexity", "bits_per_character", "document_tokens", "document_losses")
    return description(twin) | {name: quality[name] for name in kept}


def report(figures: Figures) -> Group:
    by_threshold = [threshold_table(figures)] if figures["thresholds"] else []
    main_lines, details = [main_line(figures), *warnings(figures)], [size(figures), certainty(figures)]
    return Group(*map(Text, main_lines), table(figures), *by_threshold, *map(Text, details))


def main_line(figures: Figures) -> str:
    gain = ""
    if "twin" in figures:
        bounds, percentage = figures.get("perplexity_gain_interval_percent"), figures["perplexity_gain_percent"]
        gain = f", {with_interval(f'{percentage:.2f}%', bounds, level=0)} below the dense twin's"
        gain += " (see the warning)" if caveats(figures) else ""
    return f"{figures['model']}: perplexity {figures['perplexity']:.4g}{gain}; mean depth {figures['mean_depth']:.3f}"


def table(figures: Figures) -> Table:
    """List the perplexities of π_mix, each exit, an oracle router and the twin, with the shares of the exits."""
    made = Table("distribution", "perplexity", "mean p_k", "posterior", box=SIMPLE)
    made.add_row("π_mix", shown(figures["perplexity"]))
    columns = (figures[name] for name in ("exit_perplexities", "exit_shares", "exit_posteriors"))
    for number, (place, *rest) in enumerate(zip(places(figures), *columns, strict=True), 1):
        made.add_row(f"exit {number} ({place})", *map(shown, rest))
    made.add_row("oracle router", shown(figures["oracle_perplexity"]))
    if "twin" in figures:
        made.add_row(f"dense twin, {figures['twin']['model']}", shown(figures["twin"]["perplexity"]))
    return made


def threshold_table(figures: Figures) -> Table:
    """List perplexity, mean depth and shares of the exits that each threshold chooses."""
    made = Table("threshold", "perplexity", "mean depth", *places(figures), box=SIMPLE)
    for row in figures["thresholds"]:
        made.add_row(f"{row['threshold']:g}", *map(shown, (row["perplexity"], row["mean_depth"], *row["exit_shares"])))
    return made


def places(figures: Figures) -> list[str]:
    return exit_places(figures["exit_layers"], figures["num_layers"], figures["num_loops"])


def size(figures: Figures) -> str:
    tokens = figures["training_tokens"]
    trained = f" trained on {tokens:,} tokens" if tokens else ""
    loops = f" run {figures['num_loops']} times" if figures["num_loops"] > 1 else ""
    return (
        f"{figures['num_parameters']:,} parameters{trained}, {figures['num_layers']} layers{loops} of width "
        f"{figures['width']}; {figures['dtype']} on {figures['device']}."
    )


def certainty(figures: Figures) -> str:
    number = len(figures["document_tokens"])
    drawn = "which 95% intervals resample" if number >= MIN_PAIRS else "too few for intervals"
    return (
        f"{figures['num_tokens']:,} tokens ({figures['num_characters']:,} characters) of {count(number, 'document')}, "
        f"{drawn}; bits per character: {figures['bits_per_character']:.4g}; entropy of p: "
        f"{abs(figures['routing_entropy']):.3f} nats."
    )
