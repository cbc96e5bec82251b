"""Recipes of story models. Two CPU cores can train all but `stories-24`, which takes eight minutes on an H200."""

from dataclasses import replace
from pathlib import Path

from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe
from nvium_core.training.schedule import LearningRate, RouterWarmup

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "stories-24m"


def tales() -> Recipe:
    """Return a recipe for books: 6.5M parameters and four exits."""
    return Recipe(
        shape=ModelShape(
            num_layers=12, width=192, mlp_width=512, num_heads=3, num_exits=4, vocab_size=2048, context=1024
        ),
        total_tokens=16_000_000,
        tokens_per_step=4096,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.01, kind="wsd", decay=0.65, final_ratio=0.0),
        beta=BetaSettings(initial=0.02, depth=0.685),
        optimizer=OptimizerSettings(muon_rate=0.02),
    )


def stories_24() -> Recipe:
    """Return the recipe of the bundled model: tales, requests answered by tales, and pieces of books, in one run.

    `python -m research.tales ask` writes the data. Exits gain more than with the vocabulary of 2,048 in `tales`, and 24
    layers are enough for early exits to save time.
    """
    recipe = tales()
    return replace(
        recipe,
        shape=replace(recipe.shape, num_layers=24, width=256, mlp_width=704, num_heads=4, vocab_size=8192),
        tokenizer=str(BUNDLED),
        text="conversations",
        total_tokens=108_134_400,
        tokens_per_step=32_768,
        router_warmup=RouterWarmup(share=0.1),
        beta=BetaSettings(initial=0.0, depth=0.63),
    )


def stories_chat() -> Recipe:
    """Return a recipe that fine-tunes `stories-24` on conversations, with a second decay of the learning rate.

    The bundled model was trained by four such runs, two of them shorter ones (see its model card).
    """
    recipe = stories_24()
    return replace(
        recipe,
        initial="runs/stories-24/model",
        tokenizer=None,
        total_tokens=1_433_600,
        tokens_per_step=4096,
        learning_rate=LearningRate(maximum=8e-4, warmup=0.02, kind="wsd", decay=0.98, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0, min_steps=0),
        beta=BetaSettings(initial=0.0085, depth=0.635),
        optimizer=OptimizerSettings(muon_rate=0.002),
    )
