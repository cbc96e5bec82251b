"""FLOPs per token against the paper's breakdown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import NviumConfig
from nvium_core.model.flops import flops_before_speaking, flops_per_token, spoken_flops
from tests.model.paper_flops import PER_MILLE, paper_config, paper_flops


@pytest.mark.parametrize(
    ("num_layers", "num_exits", "giga_flops"), [(36, 4, 0.834), (48, 4, 1.041), (26, 1, 0.499), (33, 1, 0.620)]
)
def test_the_papers_breakdown_is_reproduced(num_layers: int, num_exits: int, giga_flops: float) -> None:
    assert paper_flops(num_layers, num_exits).total == pytest.approx(giga_flops * 1e9, rel=PER_MILLE)


def test_the_parts_are_those_of_the_formula_written_out() -> None:
    layers, width, mlp, positions, vocabulary, early = 36, 768, 2048, 1024, 32_000, 3
    flops = paper_flops(36, 4)
    assert flops.layers == layers * (8 * width**2 + 6 * width * mlp)
    assert flops.attention == 4 * layers * positions * width
    assert flops.heads == (early + 1) * 2 * vocabulary * width
    assert flops.adapters == (early + 1) * 4 * width * 768
    assert flops.routers == early * 4 * width * 512
    assert flops.as_dict()["total"] == flops.layers + flops.attention + flops.heads + flops.adapters + flops.routers


def test_fewer_key_heads_save_their_share_of_the_projections() -> None:
    config = NviumConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1)
    full = NviumConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1)
    assert flops_per_token(full, 10).layers - flops_per_token(config, 10).layers == 2 * 2 * 64 * 48


@given(st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
def test_speaking_early_saves_layers_until_then_and_heads_for_good(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    config = paper_config(24, 4)
    scored = flops_per_token(config, 100)
    spoken, before = spoken_flops(config, 100, shares), flops_before_speaking(config, 100, shares)
    mean_depth = sum(share * depth / 24 for share, depth in zip(shares, config.exit_layers or [], strict=True))
    assert spoken.layers == scored.layers
    assert before.layers == pytest.approx(mean_depth * scored.layers)
    assert before.attention == pytest.approx(mean_depth * scored.attention)
    assert before.heads == spoken.heads == scored.heads / 4
    assert before.routers == spoken.routers <= scored.routers
    assert spoken.routers == pytest.approx(4 * 768 * 512 * (1 + (1 - shares[0]) + (1 - shares[0] - shares[1])))


def test_a_dense_model_spends_on_a_spoken_token_what_it_spends_on_a_scored_one() -> None:
    config = paper_config(26, 1)
    assert spoken_flops(config, 64, [1.0]) == flops_before_speaking(config, 64, [1.0]) == flops_per_token(config, 64)
