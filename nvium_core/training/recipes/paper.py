"""The paper's experiments (arXiv 2605.13190), one recipe each. Details missing in the paper are from the authors' code.

All recipes use a vocabulary of 32,000 tokens, windows of 1,024 tokens, and 20 tokens of text per parameter. The paper
uses C4 with Llama 2's tokenizer. Here, the tokenizer is trained on the text of `--data` unless `tokenizer` is set.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nvium_core.model.config import even_exit_layers
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import ModelShape, Recipe, swiglu_width
from nvium_core.training.recipes.twins import without_exits
from nvium_core.training.schedule import LearningRate, RouterWarmup

VOCAB_SIZE = 32_000
CONTEXT = 1024
TOKENS_PER_PARAMETER = 20
VALIDATION_TOKENS = 5_000_000
NUM_EVALUATIONS = 20
BETA = 0.15
SWEEP_BETA = 0.1
SEED = 42

DEPTHS = (6, 12, 24, 36, 48)
BETAS = (0.0, 0.1, 0.2, 0.3, 0.4)
NUM_EXITS = (1, 2, 3, 4, 6, 8, 12)
SINGLE_EXITS = (2, 6, 10, 14, 18, 22)

ISOFLOP = {26: 39_646, 33: 50_729}
"""Training steps of dense models by layers. The paper compares these models with 4-viums of 36 and 48 layers."""

SFT_CONVERSATIONS = 892_375
SFT_BATCH = 128
SFT_EPOCHS = 2


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


def scaling(num_layers: int, width: int, *, beta: float = BETA, exit_layers: tuple[int, ...] | None = None) -> Recipe:
    """Return the recipe of a row in the scaling tables, with four exits by default."""
    settings = WIDTHS[width]
    exits = exit_layers or four_exits(num_layers)
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=settings.num_heads,
        num_exits=len(exits),
        exit_layers=exits,
        router_width=settings.router_width,
        vocab_size=VOCAB_SIZE,
        context=CONTEXT,
    )
    return Recipe(
        shape=shape,
        total_tokens=TOKENS_PER_PARAMETER * num_parameters(shape),
        tokens_per_step=settings.tokens_per_step,
        short_context=CONTEXT,
        learning_rate=LearningRate(maximum=settings.learning_rate),
        beta=BetaSettings(initial=beta),
        seed=SEED,
        evaluations=NUM_EVALUATIONS,
        validation_tokens=VALIDATION_TOKENS,
    )


def four_exits(num_layers: int) -> tuple[int, ...]:
    """Return evenly spaced exits, except for six layers, where the authors use 1, 2, 4 and 6."""
    return (1, 2, 4, 6) if num_layers == 6 else tuple(even_exit_layers(num_layers, 4))


def beta_sweep(beta: float) -> Recipe:
    """Return the recipe of a point in the Pareto figure: the 24 × 768 model with this β."""
    return at_rate(scaling(24, 768, beta=beta), 6e-4)


def exits_sweep(num_exits: int) -> Recipe:
    """Return the recipe of a point in the Pareto figure: the 24 × 768 model with this number of exits.

    Training reads the same number of tokens for every number of exits.
    """
    recipe = scaling(24, 768, beta=SWEEP_BETA, exit_layers=tuple(even_exit_layers(24, num_exits)))
    return replace(at_rate(recipe, 6e-4), total_tokens=scaling(24, 768).total_tokens)


def single_exit(layer: int) -> Recipe:
    """Return the recipe of a point in the Pareto figure: the 24 × 768 model with one early exit and β 0."""
    return at_rate(scaling(24, 768, beta=0.0, exit_layers=(layer, 24)), 5e-4)


def at_rate(recipe: Recipe, rate: float) -> Recipe:
    return replace(recipe, learning_rate=replace(recipe.learning_rate, maximum=rate))


def largest() -> Recipe:
    """Return the recipe of the 1.5B model. β adapts to the dense twin's losses, so training needs `--dense-log`."""
    recipe = scaling(48, 1536)
    return replace(
        recipe,
        shape=replace(recipe.shape, num_heads=12),
        learning_rate=LearningRate(maximum=2e-4, kind="wsd", decay_shape="cosine"),
        beta=BetaSettings(initial=0.0, adaptive=True),
    )


def dense_of_layers(num_layers: int, num_steps: int) -> Recipe:
    """Return the recipe of a dense model in the isoFLOP and isoSpeed table.

    A deeper 4-vium generates as fast as this model and is trained with as many FLOPs.
    """
    recipe = without_exits(scaling(num_layers, 768, exit_layers=(num_layers,)))
    return replace(recipe, total_tokens=num_steps * recipe.tokens_per_step)


def tuned(num_layers: int) -> Recipe:
    """Return the recipe that tunes a model of the depth table on instructions: Tulu 3's conversations, for two epochs.

    The authors' settings: one conversation per window, truncated if longer; all tokens count in the loss; 128 windows
    per step; AdamW with TRL's defaults. `total_tokens` is an estimate for the authors' 892,375 conversations. When a
    run starts, `epochs` sets it.
    """
    recipe = scaling(num_layers, 768)
    return replace(
        recipe,
        initial=f"runs/paper-{num_layers}x768/model",
        text="conversations",
        total_tokens=SFT_EPOCHS * -(-SFT_CONVERSATIONS // SFT_BATCH) * SFT_BATCH * CONTEXT,
        epochs=SFT_EPOCHS,
        packing=False,
        answers_only=False,
        tokens_per_step=SFT_BATCH * CONTEXT,
        learning_rate=LearningRate(maximum=1e-5, warmup=0.05, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0),
        optimizer=OptimizerSettings(weight_decay=0.01, betas=(0.9, 0.999)),
    )


PAPER: dict[str, Callable[[], Recipe]] = {
    **{f"paper-{layers}x768": partial(scaling, layers, 768) for layers in DEPTHS},
    **{f"paper-24x{width}": partial(scaling, 24, width) for width in WIDTHS},
    "paper-48x1536": largest,
    **{f"paper-beta-{beta:g}": partial(beta_sweep, beta) for beta in BETAS},
    **{f"paper-exits-{num_exits}": partial(exits_sweep, num_exits) for num_exits in NUM_EXITS},
    **{f"paper-exit-at-{layer}": partial(single_exit, layer) for layer in SINGLE_EXITS},
    **{f"paper-isoflop-{layers}x768": partial(dense_of_layers, layers, steps) for layers, steps in ISOFLOP.items()},
    **{f"paper-sft-{layers}x768": partial(tuned, layers) for layers in DEPTHS},
}
"""The dense models of the paper's tables are the twins of these recipes, such as `paper-24x768-dense`."""
