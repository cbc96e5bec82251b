"""Writes GGUF files of random models and small tokenizers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from nvium_core.bench.contenders.gguf_file import rows_as_in_llama_cpp, write_shape

KIND = gguf.GGMLQuantizationType

OTHER_NAMES = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "hunyuan_v1_dense": "hunyuan_dense"}
"""Architectures that are not named after their type."""

INTERLEAVED = ("llama", "mistral", "smollm3", "granite", "arcee")
"""Types whose query and key rows llama.cpp reorders."""


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    rope_factors: Tensor | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    own: Mapping[str, Any] = {},
) -> Path:
    """Write the model with its matrices in a quantization type. `tokenizer` are metadata fields.

    own: fields of the architecture, without its prefix, beside or instead of those of every model.
    architecture: its name, if it is not that of the model's type. The tensors' names and rows are those of the type.

    A model on the meta device gets ones as numbers, and random blocks of types that the library cannot quantize.
    """
    config = model.config
    arch = gguf.MODEL_ARCH[OTHER_NAMES.get(config.model_type, config.model_type).upper()]
    writer = gguf.GGUFWriter(path, architecture or gguf.MODEL_ARCH_NAMES[arch])
    write_shape(writer, config)
    add_fields(writer, {f"{writer.arch}.{name}": value for name, value in own.items()})
    add_fields(writer, tokenizer or {"tokenizer.ggml.model": "no_vocab"})
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.float().numpy())
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        rows = rows_as_in_llama_cpp(name, tensor, config) if config.model_type in INTERLEAVED else tensor
        if config.model_type.startswith("gemma") and "norm" in name:
            rows = rows + 1
        stored = np.broadcast_to(np.float32(1), rows.shape) if rows.is_meta else rows.float().numpy()
        stored_as = KIND[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(theirs, blocks(stored, stored_as), raw_dtype=stored_as)
    close(writer)
    return path


def blocks(
    stored: "np.ndarray[Any, Any]", kind: gguf.GGMLQuantizationType, size: float = 0.01
) -> "np.ndarray[Any, Any]":
    """Quantize the matrix. If the library cannot, return random blocks with scales of this size."""
    try:
        return gguf.quantize(stored, kind)
    except NotImplementedError:
        per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, row_blocks = stored.shape[0], stored.shape[1] // per_block
        random = np.random.default_rng(0).integers(0, 256, (rows, row_blocks, num_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.float16(size).tobytes(), np.uint8)
        for place in SCALES[kind.name]:
            random[:, :, place : place + 2] = scale
        return random.reshape(rows, -1)


SCALES = {
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
}
"""Byte offsets of a block's float16 scales."""


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add = {**adders, list: writer.add_array}[type(value)]
        add(name, value)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
