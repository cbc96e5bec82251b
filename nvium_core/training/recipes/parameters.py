"""How many parameters a recipe's model has, by arithmetic, so that listing recipes builds no model."""

from nvium_core.model.config import NviumConfig
from nvium_core.training.recipes.recipe import Recipe, Shape


def num_parameters(recipe: Recipe) -> int:
    """Exactly those of the model, embedding, head and exits included, a tied head counted once."""
    shape = recipe.shape
    embeddings = (1 if shape.tied_head else 2) * shape.vocab_size * shape.width
    return embeddings + shape.num_layers * layer_parameters(shape) + shape.width + exit_parameters(recipe)


def layer_parameters(shape: Shape) -> int:
    """Four attention matrices, three of the MLP, two norms."""
    key_width = (shape.num_kv_heads or shape.num_heads) * (shape.width // shape.num_heads)
    return shape.width * (2 * shape.width + 2 * key_width + 3 * shape.mlp_width + 2)


def exit_parameters(recipe: Recipe) -> int:
    """What a model has beyond a plain Llama: CALM* a norm for each early exit, LayerSkip nothing."""
    shape = recipe.shape
    num_early = shape.num_exits - 1
    if recipe.method == "layerskip":
        return 0
    if recipe.method == "calm":
        return num_early * shape.width
    config = shape.config(shape.vocab_size, end_token=0)
    return num_early * (shape.width + router_parameters(config)) + shape.num_exits * adapter_parameters(config)


def router_parameters(config: NviumConfig) -> int:
    """Two matrices with biases, a norm, and two rows with biases."""
    width, inner = config.hidden_size, config.router_hidden_size or 0
    return 2 * width * inner + inner + width + width + 2 * width + 2


def adapter_parameters(config: NviumConfig) -> int:
    return 2 * config.hidden_size * (config.adapter_hidden_size or 0)
