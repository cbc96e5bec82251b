import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn
from torch.nn import functional as F

from nvium_core import CheckpointError, NviumForCausalLM
from nvium_core.model.gguf import EXACT, KINDS
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import QUANTIZED, StoredMatrix, materialise, quantize_model, quantized, weight_type
from tests.model.gguf_files import blocks, write_gguf
from tests.model.test_backbones import random_model as random_backbone
from tests.model.test_gguf import WIDE
from tests.random_models import random_model


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def stored(kind: str, num_rows: int = 7) -> tuple[StoredMatrix, torch.Tensor]:
    """A stored matrix, and its numbers as the library dequantizes them."""
    content = blocks(weights(num_rows, 256).numpy(), Kind[kind])
    matrix = StoredMatrix(torch.from_numpy(content).view(torch.uint8), Kind[kind])
    return matrix, torch.from_numpy(gguf.dequantize(content, Kind[kind])).view(num_rows, 256)


def test_a_parameter_and_rows_are_made_without_dispatch_which_imports_torch_distributed(monkeypatch):
    matrix, numbers = stored("Q8_0")
    monkeypatch.setattr(StoredMatrix, "__torch_dispatch__", None)
    made = nn.Parameter(matrix, requires_grad=False)
    assert torch.equal(made[2:5].numbers(), numbers[2:5])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
def test_operators_see_the_numbers_as_the_library_dequantizes_them(kind):
    matrix, numbers = stored(kind)
    assert matrix.shape == (7, 256) and matrix.dtype == torch.float32
    assert torch.equal(matrix + 0, numbers)
    assert torch.equal(matrix[2:5] + 0, numbers[2:5]) and torch.equal(matrix[::3] + 0, numbers[::3])
    assert torch.equal(F.linear(weights(3, 256), matrix), F.linear(weights(3, 256), numbers))
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(F.embedding(ids, matrix), numbers[ids])


def test_rows_in_another_order_stay_in_this_order():
    matrix, numbers = stored("Q4_K")
    order = torch.tensor([3, 1, 6, 0])
    assert torch.equal(matrix.at(order).numbers(), numbers[order])
    assert torch.equal(matrix.at(order).at(slice(1, 3)).numbers(), numbers[order[1:3]])


def test_a_stored_matrix_cannot_be_changed():
    layer = nn.Linear(256, 7, bias=False)
    layer.weight = nn.Parameter(stored("Q8_0")[0], requires_grad=False)
    with pytest.raises(TypeError, match="read-only"):
        layer.weight.copy_(weights(7, 256))
    for view in (layer.weight.data, layer.weight.narrow(0, 0, 2), layer.weight[2:4, :]):
        with pytest.raises(TypeError, match="read-only"):
            view.zero_()
    with pytest.raises(TypeError, match="read-only"):
        layer.to(torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["BF16", "Q4_K"])
@pytest.mark.parametrize("make", ["llama", "qwen2"])
def test_a_model_with_stored_matrices_equals_the_ordinary_one(make, kind, tmp_path):
    """A Llama's query and key rows are also reordered."""
    file = write_gguf(tmp_path / "model.gguf", random_backbone(make, WIDE), kind)
    ordinary = NviumForCausalLM.from_pretrained(file, dtype=torch.float32)
    model = Nvium.from_pretrained(file, dtype=torch.float32, is_stored=True)
    assert isinstance(model.lm_head.weight, StoredMatrix) and model.num_parameters() == ordinary.num_parameters()
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, ordinary(ids).logits)
    materialise(model)
    for name, weight in ordinary.named_parameters():
        assert type(model.get_parameter(name)) is nn.Parameter
        assert torch.equal(model.get_parameter(name), weight), name


def test_a_converted_model_has_ordinary_parameters(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", random_backbone("qwen2", WIDE | {"tie_word_embeddings": True}), "Q8_0")
    model = Nvium.from_pretrained(file, dtype=torch.float32, is_stored=True)
    exact = model.lm_head.weight.numbers()
    assert torch.equal(model.bfloat16().lm_head.weight, exact.bfloat16())
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
def test_numbers_that_are_not_finite_are_refused_while_they_are_converted(kind):
    matrix, layer = stored(kind)[0], nn.Linear(256, 7, bias=False)
    matrix.content[3, :8].view(torch.float16)[0] = torch.inf
    layer.weight = nn.Parameter(StoredMatrix(matrix.content, matrix.kind, place="x.gguf: name"), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"x\.gguf: name has NaN or infinite values"):
        materialise(layer)


def test_the_stored_type_is_that_of_most_numbers():
    layers = nn.Linear(256, 70, bias=False), nn.Linear(256, 10, bias=False)
    layers[0].weight = nn.Parameter(stored("Q4_K", 70)[0], requires_grad=False)
    assert weight_type(nn.ModuleList(layers)) == ("Q4_K", (70 * 4.5 + 10 * 32) / 80)


@pytest.mark.parametrize(("kind", "bound"), [("q8", 0.51 / 127), ("q4", 1.01 / 8)])
def test_the_rounding_error_is_bounded_by_the_largest_of_the_group(kind, bound):
    weight_ND = weights(7, 96)
    error_NG = (StoredMatrix(weight_ND, QUANTIZED[kind]) - weight_ND).abs().unflatten(1, (-1, 32)).amax(-1)
    largest_NG = weight_ND.abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((error_NG <= bound * largest_NG).all())


@pytest.mark.parametrize("kind", QUANTIZED.values())
def test_blocks_of_dequantized_blocks_are_recovered_exactly(kind):
    loaded_ND = torch.from_numpy(np.array(gguf.dequantize(gguf.quants.quantize(weights(5, 64).numpy(), kind), kind)))
    again = torch.from_numpy(gguf.dequantize(quantized(loaded_ND, kind).numpy(), kind))
    assert torch.equal(again, loaded_ND)


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


def test_a_tied_embedding_is_quantized_with_the_head():
    model = random_model([1], width=32, tie_word_embeddings=True)
    quantize_model(model, "q8")
    with pytest.raises(CheckpointError, match="weights: q8 requires dtype float32"):
        quantize_model(random_model([1], width=32, dtype=torch.bfloat16), "q8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, StoredMatrix)
