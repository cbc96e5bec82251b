"""Writes a univium as a GGUF file for llama.cpp. Requires the package gguf."""

from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedConfig

from nvium_core.bench.contenders.contender import NotAvailable
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import dequantize

FileKind = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""GGUF type of the matrices. Vectors are always float32."""


def write_gguf(univium: Nvium, file: Path, kind: FileKind) -> None:
    """Write the weights and the shape, but no tokenizer. Raise `NotAvailable` if the model scales its rotary angles."""
    gguf, config = import_module("gguf"), univium.config
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type != "default":
        raise NotAvailable(f"writing a GGUF file with rope_type {rope_type!r} is not supported")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("no_vocab")
    write_shape(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for own_name, tensor in univium.state_dict().items():
        name = own_name.replace("exits.0.", "model.")  # the final norm
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = rows_as_in_llama_cpp(name, dequantize(tensor), config).float().cpu().numpy()
        stored_as = gguf.GGMLQuantizationType[kind.upper() if tensor.dim() > 1 else "F32"]
        data = gguf.quants.quantize(stored, stored_as)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: Any, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters or {}
    rope = ropes.get("full_attention", ropes)
    for field, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope_freq_base": rope.get("rope_theta", 10_000.0),
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }.items():
        getattr(writer, f"add_{field}")(value)


def rows_as_in_llama_cpp(name: str, tensor: Tensor, config: PreTrainedConfig) -> Tensor:
    """Reorder the rows of query and key projections: llama.cpp stores the two rows of a rotary pair side by side.

    In our order the two rows are half a head apart. Return other tensors unchanged.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = next((number for part, number in heads.items() if f".{part}." in name), None)
    if num_heads is None:
        return tensor
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
