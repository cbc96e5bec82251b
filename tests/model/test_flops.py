import pytest

from nvium_core.model.flops import flops_per_token
from nvium_core.training.recipes.catalogue import recipe_named
from research.paper.sweeps import paper

PER_MILLE = 1e-3


def paper_flops(num_layers: int, num_exits: int) -> float:
    """Return the FLOPs per token of the paper's models of width 768."""
    name, *settings = paper()[f"paper-isoflop-{num_layers}"] if num_exits == 1 else [f"paper-{num_layers}x768"]
    shape = recipe_named(name, settings).shape
    assert shape.num_exits == num_exits
    return flops_per_token(shape.config(shape.vocab_size, end_token=0), 1024)


@pytest.mark.parametrize(
    ("num_layers", "num_exits", "giga_flops"), [(36, 4, 0.834), (48, 4, 1.041), (26, 1, 0.499), (33, 1, 0.620)]
)
def test_the_papers_breakdown_is_reproduced(num_layers, num_exits, giga_flops):
    assert paper_flops(num_layers, num_exits) == pytest.approx(giga_flops * 1e9, rel=PER_MILLE)
