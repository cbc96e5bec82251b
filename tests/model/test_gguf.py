from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nvium_core import CheckpointError, NviumConfig, NviumForCausalLM
from nvium_core.model.gguf import open_gguf, read_config, read_gguf, read_tensors
from tests.model.gguf_files import KIND, close, write_gguf
from tests.model.llama_folders import LLAMA_3_ROPE
from tests.model.test_backbones import F32, GEMMA, GRANITE, TWO_ROPES, YARN, random_ids, random_model

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 64}
MAKES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "smollm3": {"tie_word_embeddings": True},
    "gemma2": GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": GEMMA | {"num_hidden_layers": 7, "rope_parameters": TWO_ROPES},
    "granite": GRANITE,
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 3},
    "ernie4_5": {"head_dim": 12},
    "glm4": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8, "rope_parameters": DEFAULT_ROPE},
    "phi3": {"sliding_window": None},
    "arcee": {"hidden_act": "relu2"},
}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {
        "attention.sliding_window": 6,
        "rope.freq_base_swa": 100.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 6.0},
    "olmo3": {
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
    "exaone4": {"attention.sliding_window": 6, "attention.sliding_window_pattern": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("make", MAKES)
def test_a_file_gives_the_log_probabilities_of_transformers(make, tmp_path):
    theirs = random_model(make, MAKES[make])
    path = write_gguf(tmp_path / "model.gguf", theirs, own=OWN_FIELDS.get(make, {}))
    ours = NviumForCausalLM.from_pretrained(path, dtype=torch.float32)
    input_ids = random_ids(2, 40)
    torch.testing.assert_close(ours(input_ids).logits, theirs(input_ids).logits.log_softmax(-1), rtol=0, atol=F32)


@pytest.mark.parametrize("pattern", ["abcd", 0, 2.5, [True] * 5])
def test_a_pattern_of_windows_that_fits_no_layers_is_refused_by_name(pattern, tmp_path):
    own = {"attention.sliding_window": 6, "attention.sliding_window_pattern": pattern}
    file = write_gguf(tmp_path / "model.gguf", random_model("gemma3_text", GEMMA), own=own)
    with pytest.raises(CheckpointError, match="sliding_window_pattern must be a positive integer or 4 flags"):
        NviumForCausalLM.from_pretrained(file)


def test_the_suggested_sampling_is_read(tmp_path):
    fields = {"temp": 0.6, "top_k": 40, "penalty_repeat": 1.1, "mirostat": 0}
    tokenizer = {"tokenizer.ggml.model": "no_vocab", **{f"general.sampling.{name}": fields[name] for name in fields}}
    path = write_gguf(tmp_path / "model.gguf", random_model("llama", MAKES["llama"]), tokenizer=tokenizer)
    read = NviumForCausalLM.from_pretrained(path).generation_config
    assert (read.temperature, read.top_k, read.repetition_penalty, read.top_p) == (0.6, 40, 1.1, None)


PRECISIONS = [("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), PRECISIONS)
def test_a_file_keeps_its_precision_and_quantized_ones_become_bfloat16(kind, dtype, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", random_model("qwen2", WIDE), kind)
    assert NviumForCausalLM.from_pretrained(file).dtype == getattr(torch, dtype)


LLAMA_3 = LLAMA_3_ROPE | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}


def test_llama_3_factors_become_its_rope_scaling(tmp_path):
    stretched, plain = (
        random_model("llama", {"head_dim": 64, "num_hidden_layers": 1, "rope_parameters": rope})
        for rope in (LLAMA_3, {"rope_type": "default", "rope_theta": LLAMA_3["rope_theta"]})
    )
    factors = plain.model.rotary_emb.inv_freq / stretched.model.rotary_emb.inv_freq
    assert factors.max() == pytest.approx(8) and factors.min() == 1
    file = write_gguf(tmp_path / "model.gguf", stretched, rope_factors=factors)
    assert read_config(open_gguf(file)).rope_parameters == pytest.approx(LLAMA_3)


def with_fields(path: Path, model: PreTrainedModel, fields: dict[str, Any]) -> Path:
    return write_gguf(path, model, tokenizer={"tokenizer.ggml.model": "no_vocab"} | fields)


def test_named_and_well_known_end_tokens_end_a_text(tmp_path):
    tokens = ["a", "</s>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "b", "c"]
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eom_token_id": 6, "tokenizer.ggml.tokens": tokens}
    file = with_fields(tmp_path / "model.gguf", random_model("qwen2", WIDE), ids)
    assert read_config(open_gguf(file)).eos_token_id == [1, 2, 3, 4, 5, 6]


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_type_is_linear(name, tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    theirs = random_model("llama", {"num_key_value_heads": 1, "rope_parameters": rope})
    ours = NviumForCausalLM.from_pretrained(
        with_fields(tmp_path / "model.gguf", theirs, {f"llama.{name}": 4}), dtype=torch.float32
    )
    input_ids = random_ids(2, 40)
    torch.testing.assert_close(ours(input_ids).logits, theirs(input_ids).logits.log_softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["expert_count", "logit_scale", "rope.scaling.yarn_ext_factor", "something.new"])
def test_an_unknown_field_that_changes_the_computation_is_rejected(name, tmp_path):
    model = random_model("qwen2", WIDE)
    read_config(open_gguf(with_fields(tmp_path / "neutral.gguf", model, {f"qwen2.{name}": 0})))
    with pytest.raises(CheckpointError, match=f"qwen2.{name} is 2"):
        read_config(open_gguf(with_fields(tmp_path / "model.gguf", model, {f"qwen2.{name}": 2})))


def test_a_contradictory_shape_is_rejected_before_the_tensors_are_read(tmp_path):
    file = with_fields(tmp_path / "model.gguf", random_model("llama", WIDE), {"llama.attention.head_count": 3})
    with pytest.raises(CheckpointError, match="head"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, 0, "must be a positive integer, got 0") for name in ("attention.head_count", "block_count")),
        ("embedding_length", [4, 4], "must be a positive integer, got a list, one value per layer"),
        ("attention.head_count_kv", [1, 2], "must be a positive integer, got a list, one value per layer"),
        ("attention.key_length", "a", "must be a positive integer, got 'a'"),
        ("attention.layer_norm_rms_epsilon", "a", "must be a number, got 'a'"),
        ("attention.sliding_window", [1, 2], "must be a number, got a list, one value per layer"),
        ("rope.freq_base", "a", "must be a number, got 'a'"),
        ("rope.scaling.factor", "a", "must be a number, got 'a'"),
    ],
)
def test_a_value_of_a_wrong_type_is_rejected_by_name(name, value, message, tmp_path):
    file = with_fields(tmp_path / "model.gguf", random_model("llama", MAKES["llama"]), {f"llama.{name}": value})
    with pytest.raises(CheckpointError, match=rf"model\.gguf: llama\.{name} {message}$"):
        read_config(open_gguf(file))


@pytest.mark.parametrize("kind", ["MXFP4", "IQ3_S", "TQ1_0"])
def test_an_unsupported_type_is_named_once(kind, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    block, num_bytes = gguf.GGML_QUANT_SIZES[KIND[kind]]
    content = np.zeros((block, num_bytes), np.uint8)
    writer.add_tensor("output.weight", content, raw_dtype=KIND[kind])
    close(writer)
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}/model\.gguf: output.weight has type {kind}; supported: F32"
    ):
        dict(read_tensors(open_gguf(tmp_path / "model.gguf"), NviumConfig()))


@pytest.mark.parametrize("name", ["model.GGUF", "sha256-0123abc"])
def test_a_file_is_recognised_by_its_suffix_or_magic_number(name, tmp_path):
    model = random_model("qwen2", WIDE)
    loaded = NviumForCausalLM.from_pretrained(write_gguf(tmp_path / name, model))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_folder_without_a_model_names_its_gguf_files(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, random_model("qwen2", WIDE))
    with pytest.raises(CheckpointError, match=rf"pass a model folder, or {tmp_path}/a\.gguf or {tmp_path}/b\.gguf$"):
        NviumForCausalLM.from_pretrained(tmp_path)


def test_a_shard_of_a_split_model_is_refused_with_the_command_that_merges(tmp_path):
    file = with_fields(tmp_path / "model.gguf", random_model("qwen2", WIDE), {"split.count": 2})
    with pytest.raises(CheckpointError, match="merge the shards with llama-gguf-split --merge"):
        NviumForCausalLM.from_pretrained(file)
