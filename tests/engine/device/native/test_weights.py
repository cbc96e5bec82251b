import pytest
import torch
from gguf import GGMLQuantizationType as StoredKind

from nvium_core import Engine, NviumForCausalLM, SamplingParams
from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library, weights
from nvium_core.engine.device.native.weights import PIECE_BYTES, Packed, Packer, packed_kind
from nvium_core.engine.device.paged_cache import CACHE_LINE
from nvium_core.errors import CheckpointError
from nvium_core.model.stored import StoredMatrix
from tests.random_models import random_model
from tests.rounded import round_to


def packer(model: NviumForCausalLM) -> Packer:
    compiled = library.native_library(processor.instructions())
    if compiled is None:
        pytest.skip("no C++ compiler here")
    return Packer(compiled, 2, weights.packed_bytes(model, compiled))


def test_pieces_are_zero_aligned_and_do_not_overlap():
    packer_ = packer(random_model([1]))
    pieces = [packer_.zeros(size) for size in (1, 64, 100, PIECE_BYTES // 4, PIECE_BYTES, 3)]
    for number, piece in enumerate(pieces, start=1):
        assert not piece.any()
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces, start=1))
    assert all(piece.data_ptr() % CACHE_LINE == 0 for piece in pieces)


@pytest.mark.parametrize("parts", [{"attention_bias": True}, {"mlp_bias": True}])
def test_a_model_with_unknown_parts_runs_through_the_layers(parts):
    assert weights.supports(random_model([1]))
    assert not weights.supports(random_model([1], **parts))


@pytest.mark.parametrize("path", ["", "model", "model.layers.1.mlp", "exits.0", "exits.0.router", "exits.1.adapter"])
def test_a_model_with_an_unknown_parameter_runs_through_the_layers(path):
    model = random_model([1, 2])
    assert weights.supports(model)
    extra = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    model.get_submodule(path).register_parameter("scale_of_its_own", extra)
    assert not weights.supports(model)


def test_a_model_of_mixed_precision_runs_through_the_layers():
    model = random_model([1, 2], dtype=torch.bfloat16)
    assert weights.supports(model)
    model.model.layers[1].mlp.float()
    assert not weights.supports(model)


def packed_exits(model: NviumForCausalLM) -> list[list[weights.Weight]]:
    _, exits = weights.pack_weights(model, packer(model))
    return [[*parts.values()] for parts in exits.weights]


def test_exits_share_one_packed_head():
    first, *others = packed_exits(random_model([1, 2, 3]))
    assert all(other[-1] is first[-1] for other in others)


def test_a_matrix_is_narrowed_only_if_that_is_exact():
    matrix = torch.ones(3, 4)
    assert packed_kind(matrix) == StoredKind.BF16
    matrix[0, 0] = 1 + 2**-20
    assert packed_kind(matrix) == StoredKind.F32
    assert packed_kind(torch.ones(3, 4, dtype=torch.float64)) == StoredKind.F64


def test_quantized_matrices_and_halves_keep_their_type():
    model = random_model([1], dtype=torch.float32, width=64)
    round_to(model, "Q4_0")
    layers, _ = weights.pack_weights(model, packer(model))
    assert [weight.kind for weight in layers.weights[0].values() if isinstance(weight, Packed)] == [StoredKind.Q4_0] * 7
    halves = StoredMatrix(torch.ones(3, 4, dtype=torch.float16), dtype=torch.float32)
    assert packed_kind(halves) == StoredKind.F16


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_bytes_of_the_packed_weights_are_known_before_packing(is_tied, monkeypatch, caplog):
    model = random_model([1, 2], dtype=torch.float32, width=64, tie_word_embeddings=is_tied)
    round_to(model, "Q4_0")
    monkeypatch.setattr(weights, "REPORT_SECONDS", -1)
    with caplog.at_level("INFO"):
        structs = weights.pack_weights(model, packer(model))
    parts = [part for each in structs for named in each.weights for part in named.values()]
    made = {id(part.data): part.data for part in parts if isinstance(part, Packed)}
    assert sum(data.nbytes for data in made.values() if data is not None) == packer(model)._total_bytes > 0
    assert "packed 0.00 of 0.00 GB of weights" in caplog.text


def test_halves_compute_exactly_what_their_floats_compute():
    model, prompts = random_model([1, 2], dtype=torch.float32, width=48, vocab_size=37), [[1, 2, 3], [4]]
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.half())
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, logprobs=2)
    expected = Engine(model).generate(prompts, params)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            halves = StoredMatrix(module.weight.detach().half(), dtype=torch.float32)
            module.weight = torch.nn.Parameter(halves, requires_grad=False)
    assert Engine(model).generate(prompts, params) == expected


def test_an_adapter_that_adds_zero_is_skipped():
    model = random_model([1, 3])
    last = model.exits[1]
    last.get_parameter("adapter.down.weight").data.zero_()
    assert [parts.count(None) for parts in packed_exits(model)] == [0, 9]  # the last exit has no router either
    last.get_parameter("adapter.up.weight").data[0, 0] = torch.nan
    assert packed_exits(model)[1].count(None) == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [StoredKind.Q8_0, StoredKind.Q4_0])
def test_floats_are_quantized_to_the_same_blocks_as_by_the_reference(kind, dtype):
    """Also where elements are as large as each other, tiny, zero, huge or not finite."""
    numbers = torch.randn(9, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    numbers[1] = numbers[1].sign()
    numbers[2:5] *= torch.tensor([[0.0], [1e-7], [1e4]])
    numbers[5, 40] = 2**15 * 1.5
    matrix = StoredMatrix(numbers.to(dtype), kind)
    assert torch.equal(packer(random_model([1]))._held(matrix), matrix.held())
    numbers[6:, 3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    with pytest.raises(CheckpointError, match="file: tensor x has NaN or infinite values"):
        packer(random_model([1])).pack(StoredMatrix(numbers.to(dtype), kind, torch.float32, place="file: tensor x"))
