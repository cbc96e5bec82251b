"""Training FLOPs, computed from a recipe without building the model (paper, section on FLOPs).

As in the paper, attention counts the whole window, and a backward pass counts as two forward passes.
"""

from nvium_core.model.flops import flops_per_token
from nvium_core.training.recipes.recipe import Recipe


def training_flops(recipe: Recipe, checkpointing: bool = False) -> float:
    """Return the FLOPs of a whole run. Activation checkpointing adds a forward pass through the layers."""
    long_tokens = round(recipe.total_tokens * recipe.long_context_share)
    windows = {recipe.short_context: recipe.total_tokens - long_tokens}
    windows[recipe.shape.context] = windows.get(recipe.shape.context, 0) + long_tokens
    return sum(tokens * token_flops(recipe, context, checkpointing) for context, tokens in windows.items())


def token_flops(recipe: Recipe, context: int, checkpointing: bool = False) -> float:
    """Return the FLOPs of training on one token, in windows of `context` tokens."""
    shape = recipe.shape
    forward = flops_per_token(shape.config(shape.vocab_size, end_token=0), context)
    return 3 * forward.total + (forward.layers + forward.attention if checkpointing else 0)
