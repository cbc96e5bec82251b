"""Recipes of story models, such as the bundled model. Two CPU cores can train them. A GPU needs only minutes."""

from collections.abc import Callable
from dataclasses import replace

from nvium_core.training.data.documents import Diet
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe, swiglu_width
from nvium_core.training.schedule import LearningRate, RouterWarmup


def tales() -> Recipe:
    """Return a recipe for books: 6.5M parameters and four exits. Training takes 78 minutes on a core with bfloat16."""
    return Recipe(
        shape=ModelShape(
            num_layers=12, width=192, mlp_width=512, num_heads=3, num_exits=4, vocab_size=2048, context=1024
        ),
        total_tokens=16_000_000,
        tokens_per_step=4096,
        short_context=256,
        long_context_share=0.07,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.01, kind="wsd", decay=0.65, final_ratio=0.0),
        beta=BetaSettings(initial=0.02, depth=0.685),
        optimizer=OptimizerSettings(muon_rate=0.02),
        diet=Diet(simple_share=0.25, short_characters=4000, simple_epochs=2.0, other_epochs=0.5, untitled_share=0.5),
    )


def second_decay(recipe: Recipe, *, initial: str, beta: BetaSettings) -> Recipe:
    """Return a recipe that trains `initial` further, on the text in another order, at a lower learning rate."""
    return replace(
        recipe,
        initial=initial,
        learning_rate=LearningRate(maximum=3e-3, warmup=0.02, kind="wsd", decay=0.98, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0),
        beta=beta,
        optimizer=OptimizerSettings(muon_rate=0.008),
        seed=1,
    )


def stories() -> Recipe:
    """Return `tales` with a vocabulary of 8,192, for the same books and synthetic stories.

    Short documents are read four times. A random half of the other documents is read once. Exits gain more than with
    the vocabulary of 2,048 in `tales`.
    """
    recipe = tales()
    return replace(
        recipe,
        shape=replace(recipe.shape, vocab_size=8192),
        total_tokens=14_000_000,
        beta=BetaSettings(initial=0.0, depth=0.72),
        diet=Diet(short_characters=4000, simple_epochs=4.0, other_epochs=0.5, untitled_share=0.5),
    )


def stories_24() -> Recipe:
    """Return a recipe for synthetic stories only: 24M parameters, and enough layers for early exits to save time."""
    recipe = stories()
    shape = replace(recipe.shape, num_layers=24, width=256, mlp_width=swiglu_width(256), num_heads=4)
    return replace(
        recipe,
        shape=shape,
        total_tokens=10_000_000,
        long_context_share=0.2,
        beta=BetaSettings(initial=0.0, depth=0.7),
        diet=Diet(),
        checkpoint_every=100,
        evaluations=10,
    )


def stories_again() -> Recipe:
    """Return a recipe that trains `stories` further, with a second decay of the learning rate.

    The data are a few books and synthetic stories. `python -m research.tales vary` writes each story several times with
    other names.
    """
    recipe = stories()
    decayed = second_decay(recipe, initial="runs/stories/model", beta=replace(recipe.beta, initial=0.06))
    diet = replace(recipe.diet, simple_epochs=1.0, other_epochs=0.1)
    return replace(decayed, total_tokens=5_200_000, long_context_share=0.2, diet=diet)


def stories_chat() -> Recipe:
    """Return a recipe that fine-tunes `stories-again` to tell the story that a user asks for.

    `python -m research.tales instruct` writes the data: conversations about synthetic stories, several for each story.
    """
    recipe = stories()
    return replace(
        recipe,
        initial="runs/stories-again/model",
        text="conversations",
        total_tokens=1_638_400,
        tokens_per_step=8192,
        short_context=recipe.shape.context,
        learning_rate=LearningRate(maximum=3e-4, warmup=0.05, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0),
        beta=replace(recipe.beta, initial=0.06),
        optimizer=OptimizerSettings(),
        diet=Diet(),
        evaluations=6,
    )


def stories_asked() -> Recipe:
    """Return a recipe that trains `stories-chat` further, with a third decay of the learning rate.

    The data are questions answered by synthetic stories, and stories alone. `python -m research.tales ask` writes them.
    The weights of the bundled model are the mean of several such models.
    """
    recipe = stories_chat()
    decayed = second_decay(recipe, initial="runs/stories-chat/model", beta=recipe.beta)
    return replace(decayed, total_tokens=4_096_000, tokens_per_step=4096, seed=2)


TALES: dict[str, Callable[[], Recipe]] = {
    "tales": tales,
    "stories": stories,
    "stories-24": stories_24,
    "stories-again": stories_again,
    "stories-chat": stories_chat,
    "stories-asked": stories_asked,
}
