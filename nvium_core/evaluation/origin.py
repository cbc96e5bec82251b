"""Which text and prompts figures were measured on, so that only comparable ones are compared.

Older evaluations lack this; theirs are told apart by the characters of the text and the numbers of prompts.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from nvium_core.bench.harness import Figures
from nvium_core.training.data.documents import END_OF_TEXT

OPENINGS = "openings"
"""The category of prompts that are the openings of the text's documents."""

DIGITS = 12
"""Shown of a digest."""


def measured_on(
    data: Path, documents: Sequence[str], spec_bench: Path | None = None, per_category: int | None = None
) -> Figures:
    """For an evaluation's JSON. The text's digest is over its documents, independent of the file's format."""
    text = f"\n{END_OF_TEXT}\n".join(documents).encode()
    found: Figures = {
        "text": {"file": data.name, "sha256": hashlib.sha256(text).hexdigest(), "num_documents": len(documents)}
    }
    if spec_bench:
        digest = hashlib.sha256(spec_bench.read_bytes()).hexdigest()
        found["spec_bench"] = {"file": spec_bench.name, "sha256": digest, "prompts_per_category": per_category}
    return found


def is_same_text(one: Figures, other: Figures) -> bool:
    digests = [figures.get("text", {}).get("sha256") for figures in (one, other)]
    if all(digests):
        return bool(digests[0] == digests[1])
    return bool(one["num_characters"] == other["num_characters"])


def are_same_prompts(one: Figures, other: Figures) -> bool:
    """By their numbers, and Spec-Bench's digest or the text they come from."""
    numbers = numbers_of_prompts(one)
    if numbers != numbers_of_prompts(other):
        return False
    if OPENINGS in numbers:
        return is_same_text(one, other)
    digests = [figures.get("spec_bench", {}).get("sha256") for figures in (one, other)]
    return digests[0] == digests[1] or None in digests


def numbers_of_prompts(figures: Figures) -> dict[str, int]:
    """By category; none where speed was not measured."""
    categories = figures.get("latency", {}).get("categories", {})
    counts: dict[str, int] = figures.get("prompts") or {name: each["prompts"] for name, each in categories.items()}
    return counts


def kinds(evaluations: Sequence[Figures], are_same: Callable[[Figures, Figures], bool]) -> list[list[Figures]]:
    """Groups that agree, in order of their first members."""
    found: list[list[Figures]] = []
    for figures in evaluations:
        alike = next((kind for kind in found if are_same(kind[0], figures)), None)
        if alike is None:
            found.append(alike := [])
        alike.append(figures)
    return found


def differences(evaluations: Sequence[Figures]) -> str:
    """What must not be compared and why, as Markdown; empty if all were measured on the same."""
    texts = kinds([figures for figures in evaluations if "num_characters" in figures], is_same_text)
    prompts = kinds([figures for figures in evaluations if numbers_of_prompts(figures)], are_same_prompts)
    parts = []
    if len(texts) > 1:
        parts += ["**Not of the same text**, so perplexities and gains cannot be compared:", listed(texts, text_name)]
    if len(prompts) > 1:
        parts += ["**Not on the same prompts**, so speeds cannot be compared:", listed(prompts, prompts_name)]
    return "\n\n".join(parts)


def listed(kinds: Sequence[Sequence[Figures]], name: Callable[[Figures], str]) -> str:
    return "\n".join(f"- {name(kind[0])}: {'; '.join(figures['model'] for figures in kind)}" for kind in kinds)


def text_name(figures: Figures) -> str:
    length = f"{figures['num_characters']:,} characters"
    if "text" not in figures:
        return length
    text = figures["text"]
    return f"{text['file']} ({text['num_documents']:,} documents, {length}, sha256 {text['sha256'][:DIGITS]}…)"


def prompts_name(figures: Figures) -> str:
    numbers = numbers_of_prompts(figures)
    if OPENINGS in numbers:
        return f"{numbers[OPENINGS]} openings of {text_name(figures)}"
    name = f"{sum(numbers.values())} prompts of {len(numbers)} categories"
    if "spec_bench" not in figures:
        return name
    return f"{name} of {figures['spec_bench']['file']} (sha256 {figures['spec_bench']['sha256'][:DIGITS]}…)"
