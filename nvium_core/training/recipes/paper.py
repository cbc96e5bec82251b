"""The paper's models (arXiv 2605.13190), by layers and width. Details missing in the paper are from the authors' code.

All recipes use a vocabulary of 32,000 tokens, windows of 1,024 tokens, and 20 tokens of text per parameter. The paper
uses C4 with Llama 2's tokenizer. Here, the tokenizer is trained on the text of `--data` unless `tokenizer` is set.
"""

from dataclasses import dataclass

from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe, swiglu_width
from nvium_core.training.recipes.twins import num_parameters
from nvium_core.training.schedule import LearningRate


@dataclass(frozen=True, kw_only=True)
class Width:
    """Settings that depend on the model's width. Learning rates follow Pythia."""

    num_heads: int
    router_width: int
    learning_rate: float
    tokens_per_step: int


WIDTHS = {
    128: Width(num_heads=4, router_width=88, learning_rate=1e-3, tokens_per_step=2**16),
    256: Width(num_heads=8, router_width=176, learning_rate=1e-3, tokens_per_step=2**17),
    512: Width(num_heads=8, router_width=344, learning_rate=1e-3, tokens_per_step=2**18),
    768: Width(num_heads=12, router_width=512, learning_rate=4e-4, tokens_per_step=2**18),
    1024: Width(num_heads=16, router_width=688, learning_rate=3e-4, tokens_per_step=2**19),
    1536: Width(num_heads=24, router_width=1016, learning_rate=3e-4, tokens_per_step=2**19),
}


def pretrained(num_layers: int, width: int) -> Recipe:
    """Return the recipe of a row in the scaling tables, with four exits and a fixed β.

    The paper trained 48x1536 in another way: 12 heads, learning rate 2e-4 (warm-up, stable, decay), adaptive β.

    Raise `ValueError` for another width than `WIDTHS`.
    """
    if width not in WIDTHS:
        raise ValueError(f"the width must be one of {', '.join(map(str, WIDTHS))}")
    settings = WIDTHS[width]
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=settings.num_heads,
        num_exits=4,
        exit_layers=(1, 2, 4, 6) if num_layers == 6 else (),  # the authors' exits; otherwise they are evenly spaced
        router_width=settings.router_width,
        vocab_size=32_000,
        context=1024,
    )
    return Recipe(
        shape=shape,
        total_tokens=20 * num_parameters(shape),
        tokens_per_step=settings.tokens_per_step,
        learning_rate=LearningRate(maximum=settings.learning_rate),
        beta=BetaSettings(initial=0.15),
        seed=42,
        evaluations=20,
        validation_tokens=5_000_000,
    )
