"""Models by shape: the paper's parameter counts, and routing that is what was asked for at every position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import InvalidRequest, NviumForCausalLM
from nvium_core.bench.shapes import PAPER_ROUTING, fill, force_routing, random_model, shape_config
from tests.random_models import random_model as disagreeing_model

PAPER_MILLIONS = {
    "24x128": 13,
    "24x256": 36,
    "24x512": 112,
    "24x768": 226,
    "24x1024": 381,
    "24x1536": 806,
    "6x768": 99,
    "12x768": 141,
    "36x768": 311,
    "48x768": 396,
}

shares = st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda shares: sum(shares) > 1e-3)


@pytest.mark.parametrize("shape", PAPER_MILLIONS)
def test_the_papers_shapes_have_the_papers_parameters(shape: str) -> None:
    with torch.device("meta"):
        model = NviumForCausalLM(shape_config(shape))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == PAPER_MILLIONS[shape]


@pytest.mark.parametrize(
    ("num_layers", "num_exits", "exit_layers"), [(24, 4, [6, 12, 18, 24]), (6, 4, [1, 3, 4, 6]), (3, 1, [3])]
)
def test_exits_are_as_even_as_whole_layers_allow(num_layers: int, num_exits: int, exit_layers: list[int]) -> None:
    assert shape_config(f"{num_layers}x128", num_exits).exit_layers == exit_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_random_model_speaks_finitely_and_routes_as_told(dtype: torch.dtype) -> None:
    model = random_model("4x128", routing=PAPER_ROUTING, dtype=dtype, vocab_size=50)
    with torch.inference_mode():
        output = model(torch.arange(20)[None])
    assert model.dtype == dtype
    assert output.logits.isfinite().all()
    wanted = torch.tensor(PAPER_ROUTING, dtype=torch.float64) / sum(PAPER_ROUTING)
    torch.testing.assert_close(output.exit_probs.double(), wanted.expand(1, 20, 4), rtol=0, atol=1e-6)


@given(shares)
@settings(max_examples=50)
def test_forced_routing_is_the_shares_over_their_sum(routing: list[float]) -> None:
    model = disagreeing_model([1, 2, 3])
    force_routing(model, routing)
    with torch.inference_mode():
        exit_probs = model(torch.arange(10)[None]).exit_probs
    wanted = torch.tensor(routing, dtype=torch.float64) / sum(routing)
    torch.testing.assert_close(exit_probs, wanted.expand(1, 10, 3), rtol=0, atol=1e-6)


def test_forced_routing_allows_for_the_routers_temperature() -> None:
    model = disagreeing_model([1, 2])
    router = model.exits[0].router
    router.temperature = 2.5
    force_routing(model, [0.3, 0.7])
    with torch.inference_mode():
        torch.testing.assert_close(model(torch.arange(3)[None]).exit_probs[0, 0, 0].item(), 0.3)


def test_routing_is_left_random_unless_told() -> None:
    model = random_model("4x128", vocab_size=50)
    fill(model, seed=1)
    with torch.inference_mode():
        exit_probs = model(torch.arange(20)[None]).exit_probs
    assert exit_probs.std(dim=1).min() > 0


def test_the_seed_makes_the_weights() -> None:
    one, same, other = (random_model("1x128", num_exits=1, vocab_size=50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"shape": "24"}, "shape"),
        ({"shape": "0x128"}, "shape"),
        ({"shape": "24x100"}, "shape"),
        ({"shape": "2x128", "num_exits": 3}, "num_exits"),
        ({"shape": "2x128", "num_exits": 0}, "num_exits"),
        ({"shape": "2x128", "num_exits": 2, "routing": [1.0]}, "routing"),
        ({"shape": "2x128", "num_exits": 2, "routing": [-0.1, 1.1]}, "routing"),
        ({"shape": "2x128", "num_exits": 2, "routing": [0.0, 0.0]}, "routing"),
        ({"shape": "2x128", "num_exits": 2, "routing": [0.5, float("nan")]}, "routing"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        random_model(vocab_size=50, **arguments)  # type: ignore[arg-type]
