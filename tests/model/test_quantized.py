import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from torch import nn

from nvium_core.model.quantized import Groups, groups_of, quantize, quantize_model, set_groups
from tests.random_models import random_model

GGUF_KINDS = {"q8": gguf.GGMLQuantizationType.Q8_0, "q4": gguf.GGMLQuantizationType.Q4_0}


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "bound"), [("q8", 0.51 / 127), ("q4", 1.01 / 8)])
def test_the_rounding_error_is_bounded_by_the_largest_of_the_group(kind, bound):
    weight_ND = weights(7, 96)
    error_NG = (quantize(weight_ND, kind).dequantized() - weight_ND).abs().unflatten(1, (-1, 32)).amax(-1)
    largest_NG = weight_ND.abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((error_NG <= bound * largest_NG).all())


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_groups_of_gguf_are_recovered_exactly(kind):
    stored = gguf.quants.quantize(weights(5, 64).numpy(), GGUF_KINDS[kind])
    loaded_ND = torch.from_numpy(np.array(gguf.quants.dequantize(stored, GGUF_KINDS[kind])))
    assert torch.equal(quantize(loaded_ND, kind).dequantized(), loaded_ND)


def test_a_layer_loses_its_groups_when_its_weight_changes():
    layer = nn.Linear(64, 3, bias=False)
    groups = Groups("q8", torch.arange(-96, 96, dtype=torch.int8).view(3, 64), torch.tensor([[0.5, 2.0]] * 3).half())
    set_groups(layer, groups)
    assert groups_of(layer) is groups
    assert layer.weight[0].tolist() == [*(0.5 * n for n in range(-96, -64)), *(2.0 * n for n in range(-64, -32))]
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert groups_of(layer) is None


def test_only_backbone_and_head_are_quantized():
    model, before = random_model([1, 2], width=32), random_model([1, 2], width=32)
    quantize_model(model, "q4")
    changed = {
        name
        for (name, weight), other in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(weight, other)
    }
    names = {name for name, _ in model.named_parameters()}
    assert changed == {name for name in names if name.endswith("_proj.weight") or name == "lm_head.weight"}
