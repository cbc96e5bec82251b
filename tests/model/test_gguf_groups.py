import logging
from pathlib import Path

import gguf
import pytest
import torch
from torch import nn

from nvium_core.loading import gguf_precision
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.gguf import open_gguf
from nvium_core.model.gguf_groups import GROUP_KINDS, load_groups, read_groups
from nvium_core.model.quantized import groups_of
from tests.model.gguf_files import KIND, blocks, close, write_gguf
from tests.model.test_backbones import random_model
from tests.model.test_gguf import WIDE

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("make", ["llama", "qwen2"])
def test_dequantized_groups_equal_the_librarys_bit_for_bit(make, kind, tmp_path):
    """A Llama's query and key rows are also reordered."""
    file = write_gguf(tmp_path / "model.gguf", random_model(make, WIDE), kind)
    model = NviumForCausalLM.from_pretrained(file, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    load_groups(model, open_gguf(file))
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    held = {name: groups for name, layer in layers if (groups := groups_of(layer))}
    assert len(held) == 8  # seven matrices of the layer, and the head
    assert {groups.kind for groups in held.values()} == {GROUP_KINDS[kind]}
    for name, groups in held.items():
        assert torch.equal(groups.dequantized(), before[f"{name}.weight"]), name
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_a_tied_head_has_the_groups_of_the_embedding(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE | {"tie_word_embeddings": True}), "Q8_0")
    [groups] = [groups for name, groups in read_groups(open_gguf(file)) if name == "lm_head.weight"]
    model = NviumForCausalLM.from_pretrained(file, dtype=torch.float32)
    load_groups(model, open_gguf(file))
    assert torch.equal(groups_of(model.lm_head).numbers_ND, groups.numbers_ND)
    assert torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)


def test_other_types_become_bfloat16_and_the_rounding_error_is_logged(tmp_path, caplog):
    path = tmp_path / "model.gguf"
    write_mixed(path)
    model = NviumForCausalLM.from_pretrained(path, dtype=torch.float32)
    exact = model.lm_head.weight.clone()
    with caplog.at_level(logging.INFO, logger="nvium_core.model.gguf_groups"):
        load_groups(model, open_gguf(path))
    assert torch.equal(model.lm_head.weight, exact.bfloat16().float())
    largest = (model.lm_head.weight - exact).abs().max().item()
    assert largest > 0
    assert caplog.messages == [
        f"model.gguf: 7 matrices stay quantized, 1 become bfloat16; largest rounding error {largest:.2g}"
    ]


def write_mixed(path: Path) -> None:
    """Write a Q4_0 file with a Q5_K head."""
    theirs = random_model("qwen2", WIDE)
    plain = gguf.GGUFReader(write_gguf(path.with_name("plain.gguf"), theirs, "Q4_0"))
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, field in plain.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in plain.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name == "output.weight":
            kind = KIND["Q5_K"]
            data = blocks(theirs.lm_head.weight.detach().numpy(), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    close(writer)


def test_quantized_files_load_in_float32_and_others_in_their_own_precision():
    assert gguf_precision("auto", CPU, is_quantized=True) == torch.float32
    assert gguf_precision("auto", CPU, is_quantized=False) == "auto"
    assert gguf_precision("bfloat16", CPU, is_quantized=True) == torch.bfloat16
