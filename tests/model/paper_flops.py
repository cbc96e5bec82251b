"""FLOPs of the paper's models of width 768."""

from nvium_core import NviumConfig
from nvium_core.model.flops import Flops, flops_per_token
from nvium_core.training.recipes.catalogue import recipe_named
from research.paper.sweeps import paper

PAPER_POSITIONS = 1024
PER_MILLE = 1e-3


def paper_config(num_layers: int, num_exits: int) -> NviumConfig:
    name, *settings = paper()[f"paper-isoflop-{num_layers}"] if num_exits == 1 else [f"paper-{num_layers}x768"]
    shape = recipe_named(name, settings).shape
    assert shape.num_exits == num_exits
    return shape.config(shape.vocab_size, end_token=0)


def paper_flops(num_layers: int, num_exits: int) -> Flops:
    return flops_per_token(paper_config(num_layers, num_exits), PAPER_POSITIONS)
