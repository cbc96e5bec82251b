"""Story-tellers, the embedded one among them, and their comparisons. Trains on two cores, or in minutes on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nvium_core.training.data.documents import Diet
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe
from nvium_core.training.schedule import LearningRate, RouterWarmup

SHALLOW = 0.5


def tales() -> Recipe:
    """A story-teller of books: 6.5M parameters, four exits, 78 minutes of one core with bfloat16."""
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


def tales_again() -> Recipe:
    """A second decay from the end of `tales`, two fifths of the text in windows of full length.

    The target depth is below the one wanted, since depth rises with the windows.
    """
    decayed = second_decay(tales(), initial="runs/tales/model", beta=BetaSettings(initial=0.09, depth=0.675))
    return replace(decayed, total_tokens=2_600_000, long_context_share=0.4)


def second_decay(recipe: Recipe, *, initial: str, beta: BetaSettings) -> Recipe:
    """Of a trained model, on the text in another order, at a lower rate."""
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
    """A story-teller of 8,192 tokens, where exits are worth more than with 2,048, for the text of `tales` with made
    tales behind it. What is short is read four times, the books half."""
    recipe = tales()
    return replace(
        recipe,
        shape=replace(recipe.shape, vocab_size=8192),
        total_tokens=14_000_000,
        beta=BetaSettings(initial=0.0, depth=0.72),
        diet=Diet(short_characters=4000, simple_epochs=4.0, other_epochs=0.5, untitled_share=0.5),
    )


def stories_again() -> Recipe:
    """A second decay from the end of `stories`, on little of the books and on tales that were told several times, of
    heroes with other names (`python -m nvium_core.training.tales vary`)."""
    recipe = stories()
    decayed = second_decay(recipe, initial="runs/stories/model", beta=replace(recipe.beta, initial=0.06))
    diet = replace(recipe.diet, simple_epochs=1.0, other_epochs=0.1)
    return replace(decayed, total_tokens=5_200_000, long_context_share=0.2, diet=diet)


def tales_of_depth(depth: float) -> Recipe:
    """`tales` with another target depth."""
    recipe = tales()
    return replace(recipe, beta=replace(recipe.beta, depth=depth))


def tales_chat() -> Recipe:
    """The story-teller tuned to tell what is asked for, on the same text: a question for every simple tale, and for an
    eighth of the others."""
    diet = replace(tales().diet, simple_epochs=1.0, other_epochs=0.125)
    return asked_for(tales(), initial="runs/tales-again/model", beta=0.1, diet=diet, total_tokens=2_400_000)


def stories_chat() -> Recipe:
    """Behind the embedded story-teller: `stories-again` tuned likewise, on made tales that were told several times and
    nothing else. With other stories among them it forgets to keep its hero."""
    diet = replace(stories().diet, simple_epochs=2.0)
    return asked_for(stories(), initial="runs/stories-again/model", beta=0.06, diet=diet, total_tokens=1_638_400)


def stories_asked() -> Recipe:
    """A third decay, from the end of `stories-chat`, on questions that made tales answer and on tales alone
    (`python -m nvium_core.training.tales ask`)."""
    recipe = stories_chat()
    decayed = second_decay(recipe, initial="runs/stories-chat/model", beta=recipe.beta)
    return replace(decayed, total_tokens=4_096_000, tokens_per_step=4096, seed=2)


def asked_for(recipe: Recipe, *, initial: str, beta: float, diet: Diet, total_tokens: int) -> Recipe:
    """A recipe's model tuned on conversations, from the β it had in the end. The rate is AdamW's for all weights."""
    return replace(
        recipe,
        initial=initial,
        text="conversations",
        total_tokens=total_tokens,
        tokens_per_step=8192,
        short_context=recipe.shape.context,
        learning_rate=LearningRate(maximum=3e-4, warmup=0.05, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0),
        beta=BetaSettings(initial=beta, depth=recipe.beta.depth),
        optimizer=OptimizerSettings(),
        diet=diet,
        evaluations=6,
    )


TALES: dict[str, Callable[[], Recipe]] = {
    "tales": tales,
    "tales-again": tales_again,
    "stories": stories,
    "stories-again": stories_again,
    f"tales-depth-{SHALLOW:g}": partial(tales_of_depth, SHALLOW),
    "tales-chat": tales_chat,
    "stories-chat": stories_chat,
    "stories-asked": stories_asked,
}
