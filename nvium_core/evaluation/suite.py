"""Computes and writes the figures of `nvium evaluate`."""

import hashlib
from collections.abc import Sequence

from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import numbers, subject_of
from nvium_core.engine.validation import require_threshold
from nvium_core.evaluation import perplexity
from nvium_core.evaluation.paired import perplexity_gain
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.loading import LoadedModel
from nvium_core.model.stored import materialise
from nvium_core.training.caveats import caveats
from nvium_core.training.data.corpus import END_OF_TEXT


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
