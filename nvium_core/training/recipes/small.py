"""The paper's comparisons at a size that one core trains in minutes, to check that the trends agree.

All models read the same number of tokens, so they are comparable. β is lower than in the paper, because the exits of
small models differ less. With the paper's β of 0.15, nearly all tokens leave at the first exit.
"""

from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe, swiglu_width
from nvium_core.training.schedule import LearningRate, RouterWarmup

HEAD_WIDTH = 32


def tiny() -> Recipe:
    """Return a recipe for trying out training. It takes minutes on one core. The model's text makes no sense."""
    return Recipe(
        shape=ModelShape(num_layers=4, width=64, mlp_width=176, num_heads=2, num_exits=4, vocab_size=512, context=128),
        total_tokens=1_000_000,
        tokens_per_step=2048,
        learning_rate=LearningRate(maximum=6e-3, warmup=0.05),
        router_warmup=RouterWarmup(share=0.2),
        beta=BetaSettings(initial=0.002, depth=0.7),
        optimizer=OptimizerSettings(muon_rate=0.04),
        checkpoint_every=50,
    )


def small(num_layers: int = 12, width: int = 96) -> Recipe:
    """Return the recipe of a small model with four evenly spaced exits. `width` is a multiple of 32."""
    if width % HEAD_WIDTH:
        raise ValueError(f"width must be a multiple of {HEAD_WIDTH}, got {width}")
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=width // HEAD_WIDTH,
        num_exits=4,
        vocab_size=1024,
        context=256,
    )
    return Recipe(
        shape=shape,
        total_tokens=2_000_000,
        tokens_per_step=2048,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.02, kind="wsd", decay=0.65, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.1),
        beta=BetaSettings(initial=0.02),
        optimizer=OptimizerSettings(muon_rate=0.02),  # without Muon, nearly all tokens leave at the first exit
    )
