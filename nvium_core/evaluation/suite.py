"""Computes and writes the figures of `nvium evaluate`."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict

from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import subject_of
from nvium_core.evaluation import perplexity
from nvium_core.evaluation.paired import perplexity_gain, perplexity_price
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.loading import LoadedModel
from nvium_core.model.flops import flops_per_token, flops_until_emitted, generation_flops
from nvium_core.model.stored import materialise
from nvium_core.training.caveats import caveats
from nvium_core.training.data.corpus import END_OF_TEXT


def evaluate(
    loaded: LoadedModel,
    documents: Sequence[str],
    *,
    works: Sequence[str] | None = None,
    unrounded: LoadedModel | None = None,
    twin: LoadedModel | None = None,
    thresholds: Sequence[float] = (),
    show_progress: bool = True,
) -> Figures:
    """Compute all figures, as JSON values. Raise `EvaluationError` if the twin or the works do not match.

    works: for each document, the name of its work, such as a book.
    unrounded: the same model without quantization.
    twin: a dense model to compare with.
    thresholds: evaluate `sampling: threshold` at these too.
    """
    for each in (loaded, unrounded, twin):
        if each:
            materialise(each.model)
    if twin:
        check_dense(loaded, twin)
    if works is not None and len(works) != len(documents):
        raise EvaluationError(f"works: {len(works)} lines, but the text has {len(documents)} documents")
    figures = description(loaded) | {"text": digest(documents), "document_works": list(works) if works else None}
    figures |= asdict(perplexity.evaluate(loaded.model, loaded.tokenizer, documents, show_progress, thresholds))
    figures["flops"] = flops(loaded, figures["exit_shares"])
    if unrounded:
        exact = asdict(perplexity.evaluate(unrounded.model, unrounded.tokenizer, documents, show_progress))
        figures["rounding"] = {"unrounded_perplexity": exact["perplexity"], **perplexity_price(figures, exact)}
    if twin:
        dense = twin_figures(twin, documents, show_progress)
        figures |= {"twin": dense, **perplexity_gain(figures, dense)}
    return figures | {"caveats": caveats(figures)}


def parse_thresholds(text: str | None) -> list[float]:
    """Parse thresholds separated by commas. Raise `EvaluationError` for anything but finite numbers above 0."""
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [math.nan]
    if not all(0 < each < math.inf for each in found):
        raise EvaluationError(f"--thresholds must be finite numbers above 0, separated by commas; got {text!r}")
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


def flops(loaded: LoadedModel, exit_shares: Sequence[float]) -> Figures:
    config = loaded.model.config
    positions = config.max_position_embeddings
    return {
        "positions": positions,
        "all_exits": flops_per_token(config, positions).as_dict(),
        "spoken": generation_flops(config, positions, exit_shares).as_dict(),
        "before_speaking": flops_until_emitted(config, positions, exit_shares).as_dict(),
    }


def twin_figures(twin: LoadedModel, documents: Sequence[str], show_progress: bool) -> Figures:
    quality = perplexity.evaluate(twin.model, twin.tokenizer, documents, show_progress)
    config = twin.model.config
    kept = ("perplexity", "bits_per_character", "document_tokens", "document_losses")
    return {
        **description(twin),
        **{name: getattr(quality, name) for name in kept},
        "flops": flops_per_token(config, config.max_position_embeddings).as_dict(),
    }
