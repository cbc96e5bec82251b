"""GGUF files of random models: their numbers, under our names and in our order, give transformers' answers."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nvium_core import CheckpointError, NviumForCausalLM, load_model
from nvium_core.model.gguf import KINDS, open_gguf, read_config
from tests.model.gguf_files import KIND, blocks, close, write_gguf
from tests.model.test_backbones import random_ids, random_model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 64}
MAKES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "smollm3": {"tie_word_embeddings": True},
}


@torch.no_grad()
@pytest.mark.parametrize("make", MAKES)
def test_a_file_gives_the_log_probabilities_of_transformers(make: str, tmp_path: Path) -> None:
    theirs = random_model(make, MAKES[make])
    ours = NviumForCausalLM.from_pretrained(write_gguf(tmp_path / "model.gguf", theirs), dtype=torch.float32)
    input_ids = random_ids(2, 40)
    expected = theirs(input_ids).logits.log_softmax(-1)
    torch.testing.assert_close(ours(input_ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight_is_read_as_the_library_reads_it(kind: str, tmp_path: Path) -> None:
    theirs = random_model("qwen2", WIDE)
    ours = NviumForCausalLM.from_pretrained(write_gguf(tmp_path / "model.gguf", theirs, kind), dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = blocks(theirs.state_dict()[name].numpy(), KIND[kind])
    expected = torch.from_numpy(gguf.dequantize(stored, KIND[kind])).view(256, 256)
    assert expected.abs().max() > 0
    assert torch.equal(ours.state_dict()[name], expected)


def header(*, num_tensors: int = 0, num_fields: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)


def field(kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + content


ARRAY, STRING, UINT8, MANY = 9, 8, 0, 2**40


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        header() + field(ARRAY, struct.pack("<IQ", UINT8, MANY)),
        header() + field(ARRAY, struct.pack("<IQ", STRING, MANY) + struct.pack("<Q", 0) * 3),
        header() + field(STRING, struct.pack("<Q", MANY)),
        header(num_fields=MANY) + field(UINT8, b"x"),
        header(num_tensors=MANY, num_fields=0),
    ],
)
def test_a_length_beyond_the_files_end_is_refused_at_once(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: no GGUF file, or a damaged one"):
        open_gguf(tmp_path / "model.gguf")


PRECISIONS = [("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), PRECISIONS)
def test_a_file_keeps_its_precision_and_its_groups_become_bfloat16(kind: str, dtype: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE), kind)
    assert NviumForCausalLM.from_pretrained(file).dtype == getattr(torch, dtype)


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def stretched_llama() -> tuple[PreTrainedModel, Tensor]:
    """A model with Llama 3's scaled rotary embedding, and the factors that a file has of it."""
    shape = {"head_dim": 64, "num_hidden_layers": 1}
    stretched, plain = (
        random_model("llama", shape | {"rope_parameters": rope})
        for rope in (LLAMA_3, {"rope_type": "default", "rope_theta": LLAMA_3["rope_theta"]})
    )
    return stretched, plain.model.rotary_emb.inv_freq / stretched.model.rotary_emb.inv_freq


def test_llama_3_s_factors_become_its_rotary_scaling(tmp_path: Path) -> None:
    model, factors = stretched_llama()
    assert factors.max() == pytest.approx(8) and factors.min() == 1
    file = write_gguf(tmp_path / "model.gguf", model, rope_factors=factors)
    assert read_config(open_gguf(file)).rope_parameters == pytest.approx(LLAMA_3)


def test_other_factors_are_refused(tmp_path: Path) -> None:
    model, factors = stretched_llama()
    file = write_gguf(tmp_path / "model.gguf", model, rope_factors=factors * 1.1)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not Llama 3's"):
        read_config(open_gguf(file))


def test_what_is_not_supported_is_refused_with_what_is(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE), "IQ4_XS")
    with pytest.raises(CheckpointError, match="stored as IQ4_XS, which is none of F32, F16, BF16, Q8_0, Q4_0"):
        NviumForCausalLM.from_pretrained(file)
    writer = gguf.GGUFWriter(file, "gemma2")
    close(writer)
    with pytest.raises(CheckpointError, match="'gemma2' is none of those that load: llama, qwen2, qwen3, smollm3"):
        NviumForCausalLM.from_pretrained(file)


@pytest.mark.parametrize("kept", [0, 3, 40, 3000])
def test_a_file_that_is_cut_short_is_refused_by_name(kept: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        NviumForCausalLM.from_pretrained(file)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE))
    with pytest.raises(CheckpointError, match="tokenizer 'no_vocab' is none of those that load: gpt2, llama"):
        load_model(str(file))
