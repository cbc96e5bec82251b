import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.bench.harness import Subject
from nvium_core.bench.shapes import shape_config
from nvium_core.bench.twin import dense_twin, is_llama, num_parameters, twin_config
from research.paper.iso import dense_model
from tests.model.test_backbones import random_model as random_backbone
from tests.random_models import random_model


@pytest.mark.parametrize("shape", ["4x128", "12x512"])
def test_a_twin_is_the_smallest_with_at_least_as_many_parameters(shape):
    config = shape_config(shape)
    twin = twin_config(config)
    assert num_parameters(twin) >= num_parameters(config)
    twin.intermediate_size -= 8
    assert num_parameters(twin) < num_parameters(config)
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
