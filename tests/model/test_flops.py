import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.model.flops import flops_per_token, flops_until_emitted, generation_flops
from tests.model.paper_flops import PER_MILLE, paper_config, paper_flops


@pytest.mark.parametrize(
    ("num_layers", "num_exits", "giga_flops"), [(36, 4, 0.834), (48, 4, 1.041), (26, 1, 0.499), (33, 1, 0.620)]
)
def test_the_papers_breakdown_is_reproduced(num_layers, num_exits, giga_flops):
    assert paper_flops(num_layers, num_exits).total == pytest.approx(giga_flops * 1e9, rel=PER_MILLE)


def test_the_parts_are_those_of_the_formula_written_out():
    layers, width, mlp, positions, vocabulary, early = 36, 768, 2048, 1024, 32_000, 3
    flops = paper_flops(36, 4)
    assert flops.layers == layers * (8 * width**2 + 6 * width * mlp)
    assert flops.attention == 4 * layers * positions * width
    assert flops.heads == (early + 1) * 2 * vocabulary * width
    assert flops.adapters == (early + 1) * 4 * width * 768
    assert flops.routers == early * 4 * width * 512
    assert flops.as_dict()["total"] == flops.layers + flops.attention + flops.heads + flops.adapters + flops.routers


@given(st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
def test_an_early_exit_defers_layers_and_saves_heads(weights):
    shares = [weight / sum(weights) for weight in weights]
    config = paper_config(24, 4)
    scored = flops_per_token(config, 100)
    spoken, before = generation_flops(config, 100, shares), flops_until_emitted(config, 100, shares)
    mean_depth = sum(share * depth / 24 for share, depth in zip(shares, config.exit_layers or [], strict=True))
    assert spoken.layers == scored.layers
    assert before.layers == pytest.approx(mean_depth * scored.layers)
    assert before.attention == pytest.approx(mean_depth * scored.attention)
    assert before.heads == spoken.heads == scored.heads / 4
    assert before.routers == spoken.routers <= scored.routers
    assert spoken.routers == pytest.approx(4 * 768 * 512 * (1 + (1 - shares[0]) + (1 - shares[0] - shares[1])))
