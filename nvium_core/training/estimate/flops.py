"""FLOPs of training, computed from a recipe (paper, section on FLOPs). Builds no model.

Attention is counted over the whole window, as in the paper, and a backward pass as two forward passes.
"""

from nvium_core.model.flops import Flops, flops_per_token
from nvium_core.training.recipes.recipe import Recipe


def forward_flops(recipe: Recipe, context: int) -> float:
    """FLOPs per token of a forward pass through all layers and exits, in windows of `context` tokens.

    LayerSkip's curriculum uses fewer exits than counted.
    """
    flops = flops_of(recipe, context)
    return backbone(flops) + flops.heads if recipe.method in ("calm", "layerskip") else flops.total


def flops_of(recipe: Recipe, context: int) -> Flops:
    """Of a token of an N-vium with the recipe's shape."""
    shape = recipe.shape
    return flops_per_token(shape.config(shape.vocab_size, end_token=0), context)


def backbone(flops: Flops) -> float:
    return flops.layers + flops.attention


def training_flops(recipe: Recipe, checkpointing: bool = False) -> float:
    """Of a whole run; recomputing activations adds a forward pass through the layers."""
    long_tokens = round(recipe.total_tokens * recipe.long_context_share)
    windows = {recipe.short_context: recipe.total_tokens - long_tokens}
    windows[recipe.shape.context] = windows.get(recipe.shape.context, 0) + long_tokens
    return sum(tokens * token_flops(recipe, context, checkpointing) for context, tokens in windows.items())


def token_flops(recipe: Recipe, context: int, checkpointing: bool = False) -> float:
    """Of training on one token."""
    again = backbone(flops_of(recipe, context)) if checkpointing else 0
    return 3 * forward_flops(recipe, context) + again
