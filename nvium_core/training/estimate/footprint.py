"""Memory and disk of a training run, computed from a recipe. Builds no model, allocates nothing.

Counts what autograd keeps of an uncompiled pass, tensor by tensor. Not counted: the process itself (about 0.3 GB, more
on a GPU) and, on a CPU, heap fragmentation: up to a third of the activations, none with MALLOC_MMAP_THRESHOLD_=65536.
"""

from dataclasses import dataclass, fields

import torch

from nvium_core.training.objective.cross_entropy import CHUNK_ROWS, min_chunked_rows
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import ModelShape, Recipe

WIDE = 4
"""Bytes of a float32: weights, norms, routers and losses in any precision."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass: `rows` tokens in windows of `context`, in `dtype`. `checkpointing` keeps each layer's input
    only and recomputes the rest."""

    rows: int
    context: int
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False

    @property
    def narrow(self) -> int:
        """Bytes of an element of matrix products."""
        return self.dtype.itemsize

    def casts(self, readers: int) -> int:
        """Copies of an input kept for its readers: autocast makes one for each, float32 shares it."""
        return 1 if self.narrow == WIDE else readers


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes at the peak, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def footprint(recipe: Recipe, each: Pass) -> Footprint:
    """Bytes of a training step."""
    parameters = num_parameters(recipe)
    casts = 0 if each.narrow == WIDE else each.narrow * parameters
    return Footprint(
        weights=WIDE * parameters + casts,
        gradients=WIDE * parameters,
        optimizer=optimizer_bytes(recipe),
        activations=each.rows * activation_bytes(recipe, each),
        head=head_bytes(recipe.shape, each),
    )


def optimizer_bytes(recipe: Recipe) -> int:
    """AdamW's two averages of each parameter, one for Muon's matrices; all but the ends are taken as Muon's."""
    parameters, shape = num_parameters(recipe), recipe.shape
    matrices = 0
    if recipe.optimizer.muon_rate:
        matrices = parameters - (1 if shape.tied_head else 2) * shape.vocab_size * shape.width
    return WIDE * (2 * parameters - matrices)


def activation_bytes(recipe: Recipe, each: Pass) -> int:
    """Kept per row by layers and exits, without logits."""
    shape = recipe.shape
    layer = layer_bytes(shape, each)
    inputs = shape.num_layers * WIDE * shape.width
    layers = inputs + layer if each.checkpointing else shape.num_layers * layer
    return layers + exits_bytes(recipe, each) + 2 * WIDE * shape.width // shape.num_heads


def layer_bytes(shape: ModelShape, each: Pass) -> int:
    """Per row: two norms' inputs and outcomes; inputs of q, k, v, gate and up; q, k, v and what attention gives, whose
    normalisers and mask are kept too; four times the MLP's inner width."""
    width = shape.width
    key_width = (shape.num_kv_heads or shape.num_heads) * (width // shape.num_heads)
    norms = WIDE * (4 * width + 2)
    inputs = (each.casts(3) + each.casts(2)) * width
    attention = 2 * width + 2 * key_width + each.context
    return norms + WIDE * shape.num_heads + each.narrow * (inputs + attention + 4 * shape.mlp_width)


def exits_bytes(recipe: Recipe, each: Pass) -> int:
    """Per row: norm, router, adapter and the head's input at every exit, and the last hidden state."""
    shape = recipe.shape
    config = shape.config(shape.vocab_size, end_token=0)
    width, adapter = shape.width, config.adapter_hidden_size or 0
    norms = WIDE * (2 * width + 1)
    head_input = each.narrow * width if adapter or each.narrow < WIDE else 0
    adapters = each.narrow * (2 * adapter + (each.casts(2) - 1) * width) if adapter else 0
    routers = WIDE * (3 * width + 2 * (config.router_hidden_size or 0) + 1)
    if recipe.method in ("calm", "layerskip"):
        adapters = routers = 0
    num_exits = shape.num_exits
    return num_exits * (norms + head_input + adapters + WIDE) + (num_exits - 1) * routers + WIDE * width


def head_bytes(shape: ModelShape, each: Pass) -> int:
    """Of the head: few logits are held, many are computed in chunks."""
    holds_all = each.rows < min_chunked_rows(shape.vocab_size)
    return held_head_bytes(shape, each) if holds_all else chunked_head_bytes(shape, each)


def held_head_bytes(shape: ModelShape, each: Pass) -> int:
    """The logits of all rows at all exits, and twice those of one exit in the backward pass."""
    return each.rows * (shape.num_exits + 2) * WIDE * shape.vocab_size


def chunked_head_bytes(shape: ModelShape, each: Pass) -> int:
    """The logits of a chunk, twice, and a gradient of the head; with autocast a copy of the head for each exit."""
    chunk = 2 * WIDE * min(each.rows, CHUNK_ROWS) * shape.vocab_size
    casts = 0 if each.narrow == WIDE else each.narrow * shape.num_exits * shape.vocab_size * shape.width
    return chunk + WIDE * shape.vocab_size * shape.width + casts


def checkpoint_bytes(recipe: Recipe) -> int:
    """On disk: weights and optimiser. Two are kept, and both stay while a third is written."""
    return WIDE * num_parameters(recipe) + optimizer_bytes(recipe)


def model_bytes(recipe: Recipe) -> int:
    """On disk: the finished model, in bfloat16."""
    return torch.bfloat16.itemsize * num_parameters(recipe)
