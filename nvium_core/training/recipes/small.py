"""The paper's comparisons at a size that one core trains in minutes, to check that the trends agree.

All models read the same number of tokens, so they are comparable. β is lower than in the paper, because the exits of
small models differ less. With the paper's β of 0.15, nearly all tokens leave at the first exit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nvium_core.model.config import even_exit_layers
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe, swiglu_width
from nvium_core.training.schedule import LearningRate, RouterWarmup

NUM_LAYERS = 12
WIDTH = 96
HEAD_WIDTH = 32
BETA = 0.02

DEPTHS = (4, 8, 12, 24)
WIDTHS = (64, 96, 128)
BETAS = (0.0, 0.01, 0.02, 0.04, 0.08)
NUM_EXITS = (1, 2, 3, 4, 6, 12)
SINGLE_EXITS = (1, 3, 5, 7, 9, 11)


def tiny() -> Recipe:
    """Return a recipe for trying out training. It takes minutes on one core. The model's text makes no sense."""
    return Recipe(
        shape=ModelShape(num_layers=4, width=64, mlp_width=176, num_heads=2, num_exits=4, vocab_size=512, context=128),
        total_tokens=1_000_000,
        tokens_per_step=2048,
        short_context=128,
        learning_rate=LearningRate(maximum=6e-3, warmup=0.05),
        router_warmup=RouterWarmup(share=0.2),
        beta=BetaSettings(initial=0.002, depth=0.7),
        optimizer=OptimizerSettings(muon_rate=0.04),
        checkpoint_every=50,
    )


def small(
    num_layers: int = NUM_LAYERS,
    width: int = WIDTH,
    *,
    beta: float = BETA,
    exit_layers: tuple[int, ...] = (),
) -> Recipe:
    """Return the recipe of a small model, with four evenly spaced exits by default."""
    exits = exit_layers or tuple(even_exit_layers(num_layers, 4))
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=width // HEAD_WIDTH,
        num_exits=len(exits),
        exit_layers=exits,
        vocab_size=1024,
        context=256,
    )
    return Recipe(
        shape=shape,
        total_tokens=2_000_000,
        tokens_per_step=2048,
        short_context=256,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.02, kind="wsd", decay=0.65, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.1),
        beta=BetaSettings(initial=beta),
        optimizer=OptimizerSettings(muon_rate=0.02),  # without Muon, nearly all tokens leave at the first exit
    )


def adaptive() -> Recipe:
    """Return `small` with a β that adapts to the losses of `small-adaptive-dense`. Training needs `--dense-log`."""
    return replace(small(), beta=BetaSettings(initial=0.0, adaptive=True), evaluations=20)


SMALL: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "small": small,
    **{f"small-{layers}x{WIDTH}": partial(small, layers) for layers in DEPTHS if layers != NUM_LAYERS},
    **{f"small-{NUM_LAYERS}x{width}": partial(small, width=width) for width in WIDTHS if width != WIDTH},
    **{f"small-beta-{beta:g}": partial(small, beta=beta) for beta in BETAS},
    **{f"small-exits-{n}": partial(small, exit_layers=tuple(even_exit_layers(NUM_LAYERS, n))) for n in NUM_EXITS},
    **{f"small-exit-at-{layer}": partial(small, beta=0.0, exit_layers=(layer, NUM_LAYERS)) for layer in SINGLE_EXITS},
    "small-adaptive": adaptive,
}
