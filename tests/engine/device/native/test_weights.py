"""Which models native calls know, and how their weights are stored."""

from typing import Any

import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.engine.device import native
from nvium_core.engine.device.native import weights
from nvium_core.engine.device.native.packing import NOTHING
from tests.random_models import random_model
from tests.rounded import round_to

VECTOR_BYTES = 32


@pytest.mark.parametrize("config", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_a_model_with_other_parts_is_left_to_its_layers(config: dict[str, Any]) -> None:
    model = random_model([1])
    assert native.knows(model)
    assert not native.knows(NviumForCausalLM(type(model.config)(**(model.config.to_dict() | config))))


@pytest.mark.parametrize(
    "path", ["", "model", "model.layers.1.self_attn", "exits.0", "exits.0.router", "exits.1.adapter"]
)
def test_a_model_with_a_parameter_that_native_code_does_not_read_is_left_to_its_layers(path: str) -> None:
    model = random_model([1, 2])
    assert native.knows(model)
    extra = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    model.get_submodule(path).register_parameter("scale_of_its_own", extra)
    assert not native.knows(model)


def test_a_model_of_mixed_precision_is_left_to_its_layers() -> None:
    model = random_model([1, 2], dtype=torch.bfloat16)
    assert native.knows(model)
    model.model.layers[1].mlp.float()
    assert not native.knows(model)


def test_the_head_is_stored_once() -> None:
    exits = weights.Store(random_model([1, 2, 3]), VECTOR_BYTES).exits()
    assert len({exit_.array[-1] for exit_ in exits}) == 1


def test_a_matrix_is_narrowed_unless_that_loses_a_bit() -> None:
    matrix = torch.ones(3, 4)
    assert weights.narrowed(matrix).dtype == torch.bfloat16
    matrix[0, 0] = 1 + 2**-20
    assert weights.narrowed(matrix) is matrix
    assert weights.narrowed(torch.ones(3, 4, dtype=torch.float64)).dtype == torch.float64


def test_groups_are_read_in_their_own_bytes() -> None:
    model = random_model([1], dtype=torch.float32, width=64)
    round_to(model, "q4")
    pointers = weights.Store(model, VECTOR_BYTES).block(range(1))
    assert list(pointers.array[1:8:2]) == [4] * 4


def test_an_adapter_that_adds_nothing_is_left_out() -> None:
    model = random_model([1, 3])
    last = model.exits[1]
    with torch.no_grad():
        last.get_parameter("adapter.down.weight").zero_()
    exits = weights.Store(model, VECTOR_BYTES).exits()
    assert [stored._kept.count(NOTHING) for stored in exits] == [0, 5]  # the last exit has no router either
    with torch.no_grad():
        last.get_parameter("adapter.up.weight")[0, 0] = torch.nan
    assert weights.Store(model, VECTOR_BYTES).exits()[1]._kept.count(NOTHING) == 3
