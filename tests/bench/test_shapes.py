import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Engine, InvalidRequest, NviumForCausalLM, SamplingParams
from nvium_core.bench.harness import Subject
from nvium_core.bench.shapes import (
    PAPER_ROUTING,
    dense_twin,
    force_routing,
    is_llama,
    random_weights,
    shape_config,
    twin_config,
)
from research.paper.iso import dense_model
from tests.engine.driving import exit_probabilities
from tests.model.test_backbones import random_model as random_backbone
from tests.random_models import random_model
from tests.training.recipes.test_catalogue import PAPER_MILLIONS

shares = st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda shares: sum(shares) > 1e-3)


@pytest.mark.parametrize("shape", PAPER_MILLIONS)
def test_the_papers_shapes_have_the_papers_parameters(shape):
    with torch.device("meta"):
        model = NviumForCausalLM(shape_config(shape))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == PAPER_MILLIONS[shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_random_model_has_finite_outputs_and_the_forced_routing(dtype):
    model = random_weights(shape_config("4x128", vocab_size=50), dtype=dtype)
    force_routing(model, PAPER_ROUTING)
    with torch.inference_mode():
        output = model(torch.arange(20)[None])
    assert model.dtype == dtype
    assert output.logits.isfinite().all()
    wanted = torch.tensor(PAPER_ROUTING, dtype=torch.float64) / sum(PAPER_ROUTING)
    torch.testing.assert_close(output.exit_probs.double(), wanted.expand(1, 20, 4), rtol=0, atol=1e-6)


def test_a_looped_shape_has_an_exit_after_each_loop():
    config = shape_config("4x64", 3, num_loops=3)
    assert (config.num_hidden_layers, config.exit_layers) == (4, [4, 8, 12])
    ouro = shape_config("ouro-1.4b")
    assert (ouro.exit_layers, ouro.router, ouro.norms_loops) == ([24, 48, 72, 96], "linear", True)
    assert round(NviumForCausalLM.empty(ouro).num_parameters() / 1e8) == 14


@pytest.mark.parametrize("routing", [(0.5, 0.3, 0.2), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)])
def test_linear_gates_are_forced_to_a_routing(routing):
    model = random_model([1, 2, 3], num_loops=3, norms_loops=True, router="linear")
    force_routing(model, routing)
    assert exit_probabilities(model, range(10)) == [pytest.approx(routing, abs=1e-6)] * 10
    exits = Engine(model).generate([[1]], SamplingParams(max_tokens=20, seed=0, ignore_eos=True))[0].exits
    assert {*exits} <= {number for number, share in enumerate(routing, 1) if share}


@given(shares)
@settings(max_examples=50)
def test_forced_routing_is_the_shares_over_their_sum(routing):
    model = random_model([1, 2, 3])
    force_routing(model, routing)
    wanted = [share / sum(routing) for share in routing]
    assert exit_probabilities(model, range(10)) == [pytest.approx(wanted, abs=1e-6)] * 10


@pytest.mark.parametrize(("shape", "num_exits"), [("24", 4), ("0x128", 4), ("24x100", 4), ("2x128", 3), ("2x128", 0)])
def test_an_invalid_shape_is_rejected_by_name(shape, num_exits):
    with pytest.raises(InvalidRequest, match="^num_exits: " if shape == "2x128" else "^shape: "):
        shape_config(shape, num_exits)


@pytest.mark.parametrize(("shape", "field"), [("4x64", "routing"), ("ouro-1.4b", "loops")])
def test_loops_that_do_not_fit_are_rejected_by_name(shape, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        shape_config(shape, 4, num_loops=2)


@pytest.mark.parametrize("shape", ["4x128", "12x512"])
def test_a_twin_is_the_smallest_with_at_least_as_many_parameters(shape):
    config = shape_config(shape)
    twin = twin_config(config)
    assert NviumForCausalLM.empty(twin).num_parameters() >= NviumForCausalLM.empty(config).num_parameters()
    twin.intermediate_size -= 8
    assert NviumForCausalLM.empty(twin).num_parameters() < NviumForCausalLM.empty(config).num_parameters()
    assert twin_config(shape_config("24x768")).intermediate_size == 2184  # the authors'


@pytest.mark.parametrize("make", ["qwen2", "qwen3", "smollm3"])
def test_the_twin_of_another_backbone_is_a_llama(make, tmp_path):
    random_backbone(make, {"num_hidden_layers": 4}).save_pretrained(tmp_path)
    twin = dense_twin(NviumForCausalLM.from_pretrained(tmp_path))
    assert is_llama(twin.config)


@pytest.mark.parametrize("exit_layers", [[2, 4, 6], [6]])
def test_the_twin_of_a_looped_model_runs_its_layers_once(exit_layers):
    model = random_model(exit_layers, num_loops=3, norms_loops=True, layer_norms="both", router="linear")
    twin = dense_twin(model).config
    assert (twin.num_calls, twin.exit_layers, is_llama(twin)) == (2, [2], True)


@pytest.mark.parametrize("build", [dense_twin, lambda model: dense_model(Subject("m", model, [1]), 1)])
@pytest.mark.parametrize(("is_narrow", "kept_bits"), [(True, 16), (False, 32)])
def test_dense_models_have_the_precision_of_the_model_s_layers(build, is_narrow, kept_bits):
    model = random_model([1, 2], dtype=torch.float32)
    if is_narrow:  # as in a retrofit: layers of 16 bits, exits of 32
        for weight in model.model.layers.parameters():
            weight.data.copy_(weight.bfloat16())
    twin = build(model)
    assert twin.dtype == torch.float32
    rounded = [torch.equal(weight.bfloat16().float(), weight) for weight in twin.parameters() if weight.dim() > 1]
    assert all(rounded) if kept_bits == 16 else not any(rounded)
