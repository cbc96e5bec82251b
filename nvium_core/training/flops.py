"""Floating-point operations of training, by arithmetic on a recipe (paper, section on FLOPs). Builds no model.

A multiplication and an addition are two operations. Attention is counted over the whole window, as the paper does,
and a backward pass as two forward ones.
"""

from nvium_core.training.recipes.parameters import adapter_parameters, layer_parameters
from nvium_core.training.recipes.recipe import Recipe, Shape


def forward_flops(recipe: Recipe, context: int) -> int:
    """FLOPs per token of a forward pass through all layers and exits, in windows of `context` tokens.

    LayerSkip's curriculum asks fewer exits than this counts.
    """
    return backbone_flops(recipe.shape, context) + exit_flops(recipe)


def backbone_flops(shape: Shape, context: int) -> int:
    """L(8d² + 6dm) + 4LSd where every head has keys of its own."""
    matrices = layer_parameters(shape) - 2 * shape.width
    return shape.num_layers * (2 * matrices + 4 * context * shape.width)


def exit_flops(recipe: Recipe) -> int:
    """N · 2Vd for the head, and for an N-vium N · 4d·d_a for the adapters and (N − 1) · 4d·m_r for the routers."""
    shape = recipe.shape
    heads = 2 * shape.num_exits * shape.vocab_size * shape.width
    if recipe.method in ("calm", "layerskip"):
        return heads
    config = shape.config(shape.vocab_size, end_token=0)
    routers = (shape.num_exits - 1) * 4 * shape.width * (config.router_hidden_size or 0)
    return heads + 2 * shape.num_exits * adapter_parameters(config) + routers


def training_flops(recipe: Recipe, checkpointing: bool = False) -> int:
    """FLOPs of a whole run; recomputing activations costs another forward pass through the layers."""
    long_tokens = round(recipe.total_tokens * recipe.long_context_share)
    windows = {recipe.short_context: recipe.total_tokens - long_tokens}
    windows[recipe.shape.context] = windows.get(recipe.shape.context, 0) + long_tokens
    return sum(tokens * token_flops(recipe, context, checkpointing) for context, tokens in windows.items())


def token_flops(recipe: Recipe, context: int, checkpointing: bool = False) -> int:
    """FLOPs to train on one token."""
    again = backbone_flops(recipe.shape, context) if checkpointing else 0
    return 3 * forward_flops(recipe, context) + again
