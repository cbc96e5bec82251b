"""Reads a GGUF file: its configuration, and its weights as tensors under our names.

Weights in groups with scales are rounded to bfloat16 unless another precision is asked for, tensor by tensor, and the
largest rounding is logged. `nvium_core.text.gguf_tokenizer` reads the tokenizer.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nvium_core.model.checkpoint import Checkpoint, CheckpointError
from nvium_core.model.config import NviumConfig
from nvium_core.model.source import gguf_parts

logger = logging.getLogger(__name__)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {},
}
"""`general.architecture` → the parts beyond a Llama's."""

INTERLEAVED = ("llama", "smollm3")
"""In these files rows that are rotated together are adjacent; ours are half a head apart."""

NO_ROPE_INTERVAL = 4  # SmolLM3's, which its files do not say

SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Our fields → the file's, without the architecture's prefix."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "exits.0.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>\w+)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"

COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
REQUIRED = (*COUNTS, "rms_norm_eps")
HEAD_SIZES = ("rope.dimension_count", "attention.value_length")
"""Other sizes of a head; all are the same here."""

READ = {*SHAPE.values(), *HEAD_SIZES, "attention.sliding_window", "rope.freq_base", "rope.scale_linear"}
READ |= {"rope.scaling.type", "rope.scaling.factor"}
HARMLESS = {"rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
NEUTRAL: dict[str, Any] = {"attention.causal": True} | dict.fromkeys(
    ("attention.output_scale", "embedding_scale", "logit_scale", "residual_scale", "rope.scaling.attn_factor"), 1.0
)
"""Neutral values of fields that are not read; with another value, unless zero or empty, the file is refused."""

ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
NAMED_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Tokens that end a text even if the file does not list them, as in llama.cpp (src/llama-vocab.cpp)."""

EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds that are a precision; all others are groups of numbers with scales, read as float32."""

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_CONTEXT = 8192
"""The original context of Llama 3.1 and its successors; a file stores only the resulting factors."""


class BoundedReader(gguf.GGUFReader):
    """gguf's reader, with two fixes: it checks the file's end, which a damaged length may exceed, and reads strings
    without slicing a memory map for each, which takes seconds."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        stored = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        if int(offset) + stored.itemsize * int(count) > self.data.nbytes:
            raise ValueError("it ends too early")
        return np.frombuffer(self.data, stored, int(count), int(offset))


@dataclass(frozen=True)
class GGUFFile:
    """`readers`: one for each part of a split file; the first has the fields."""

    path: Path
    readers: list[gguf.GGUFReader]

    def get(self, name: str, default: Any = None) -> Any:
        field = self.readers[0].get_field(name)
        return default if field is None else field.contents()

    @cached_property
    def architecture(self) -> str:
        name = str(self.get("general.architecture"))
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.path}: architecture {name!r} is not supported; supported: {known}")
        return name

    def shape(self, name: str, default: Any = None) -> Any:
        """A field of the architecture."""
        return self.get(f"{self.architecture}.{name}", default)

    @cached_property
    def tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {tensor.name: tensor for reader in self.readers for tensor in reader.tensors}

    def check_fields(self) -> None:
        """Raise `CheckpointError` for a field of the architecture that changes the numbers and is not read."""
        prefix = f"{self.architecture}."
        names = (name for name in self.readers[0].fields if name.startswith(prefix))
        for field in {name.removeprefix(prefix) for name in names} - READ - HARMLESS:
            value = self.shape(field)
            if value and value != NEUTRAL.get(field):
                raise CheckpointError(f"{self.path}: {prefix}{field} is {value!r}, which cannot be served")


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Raises `CheckpointError` for a damaged or other file."""
    parts = gguf_parts(path)
    try:
        written = [part.stat() for part in parts]
        file = _open(parts, *((state.st_mtime_ns, state.st_size) for state in written))
    except Exception as error:  # the reader raises anything for damaged files
        raise CheckpointError(f"{path}: no GGUF file, or a damaged one ({type(error).__name__}: {error})") from error
    if file.get("split.count", 1) not in (0, len(parts)):
        raise CheckpointError(f"{path}: is part of a split model; call its parts NAME-00001-of-0000N.gguf")
    return file


@lru_cache(1)
def _open(parts: tuple[Path, ...], *written: tuple[int, int]) -> GGUFFile:
    """Cached, as tokenizer and weights are read in turn. The map is copy-on-write."""
    return GGUFFile(parts[0], [BoundedReader(part, "c") for part in parts])


def forget_gguf() -> None:
    """Release the file opened last, whose vocabulary is many objects."""
    _open.cache_clear()


def read_gguf(path: Path, config: NviumConfig | None = None, dtype: torch.dtype | None = None) -> Checkpoint:
    """Read all but the tokenizer. `dtype` None keeps the file's precision, with bfloat16 for groups."""
    file = open_gguf(path)
    precision = dtype or stored_precision(file)
    config = config or read_config(file)
    tensors, largest = dict[str, Tensor](), 0.0
    for name, tensor in read_tensors(file):
        tensors[name] = tensor.to(precision)
        if tensors[name].dtype != tensor.dtype:
            largest = max(largest, (tensors[name].to(tensor.dtype) - tensor).abs().max().item())
    logger.info("%s: weights in %s, the largest rounding is %.2g", path.name, str(precision)[6:], largest)
    return Checkpoint(config=config, tensors=tensors, folder=path)


def stored_precision(file: GGUFFile) -> torch.dtype:
    """The widest precision of the matrices; bfloat16 if any is in groups."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds <= EXACT.keys():
        return reduce(torch.promote_types, (EXACT[kind] for kind in kinds), torch.bfloat16)
    return torch.bfloat16


def read_config(file: GGUFFile) -> NviumConfig:
    """Read the configuration. Raises `CheckpointError` for features that our model lacks."""
    file.check_fields()
    try:
        fields = read_fields(file)
        return NviumConfig(rope_parameters=_rope(file, fields), **fields)
    except CheckpointError:
        raise
    except Exception as error:  # strict validation may raise anything
        raise CheckpointError(f"{file.path}: {error.__cause__ or error}") from error


def read_fields(file: GGUFFile) -> dict[str, Any]:
    fields = {ours: value for ours, theirs in SHAPE.items() if (value := file.shape(theirs)) is not None}
    fields.setdefault("vocab_size", len(file.get("tokenizer.ggml.tokens", ())))
    missing = [f"{file.architecture}.{SHAPE[name]}" for name in REQUIRED if name not in fields]
    if missing:
        raise CheckpointError(f"{file.path}: lacks {', '.join(missing)}")
    for name in COUNTS:
        if not isinstance(count := fields[name], int) or count < 1:
            raise CheckpointError(f"{file.path}: {file.architecture}.{SHAPE[name]} is {count!r}, not a positive number")
    fields |= _special_tokens(file)
    fields |= ARCHITECTURES[file.architecture] | _biases(file) | _layers_without_rotary(file, fields)
    fields |= {"tie_word_embeddings": "output.weight" not in file.tensors, "adapter_hidden_size": 0}
    window = file.shape("attention.sliding_window")
    if window:  # within it a layer attends to everything
        fields["max_position_embeddings"] = min(window, fields["max_position_embeddings"])
    return fields


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """The tokens that begin, pad and end a text. llama.cpp lets `<|end|>` end a part of an answer that has calls."""
    named = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", *ENDS)}
    ids = {token: index for index, token in enumerate(file.get("tokenizer.ggml.tokens", ())) if token in NAMED_ENDS}
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys():
        ids.pop("<|end|>", None)
    ends = sorted({*ids.values(), *(named[name] for name in ENDS)} - {None})
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": named["bos"], "eos_token_id": end, "pad_token_id": named["padding"]}


def _biases(file: GGUFFile) -> dict[str, Any]:
    if "blk.0.attn_output.bias" in file.tensors:
        return {"attention_bias": True}
    return {"qkv_bias": "blk.0.attn_q.bias" in file.tensors}


def _layers_without_rotary(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    if file.architecture != "smollm3":
        return {}
    return {"no_rope_layers": list(range(NO_ROPE_INTERVAL - 1, fields["num_hidden_layers"], NO_ROPE_INTERVAL))}


def _rope(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    """A factor without a type is linear; older files call it `rope.scale_linear`."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    for name in HEAD_SIZES:
        if (size := file.shape(name, head_dim)) != head_dim:
            raise CheckpointError(f"{file.path}: {name} is {size}; only the size of a head, {head_dim}, can be served")
    plain = {"rope_type": "default", "rope_theta": float(file.shape("rope.freq_base", 10_000.0))}
    kind = file.shape("rope.scaling.type", "linear")
    factor = float(file.shape("rope.scaling.factor") or file.shape("rope.scale_linear") or 1.0)
    is_scaled = kind != "none" and factor != 1
    if ROPE_FACTORS in file.tensors and not is_scaled:
        return _llama_3_rope(file, plain, head_dim)
    if ROPE_FACTORS in file.tensors or kind not in ("none", "linear"):
        raise CheckpointError(
            f"{file.path}: rotary scaling {kind!r} by {factor:g} is not supported; supported: "
            "none, linear, Llama 3's factors"
        )
    return plain | {"rope_type": "linear", "factor": factor} if is_scaled else plain


def _llama_3_rope(file: GGUFFile, plain: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Find the parameters of Llama 3's rotary factors by search, and check them against all factors."""
    factors = torch.from_numpy(np.array(file.tensors[ROPE_FACTORS].data, dtype=np.float32)).flatten()
    parameters = plain | LLAMA_3 | {"factor": factors.max().item(), "original_max_position_embeddings": LLAMA_3_CONTEXT}
    config = NviumConfig(head_dim=head_dim, rope_parameters=parameters)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    unscaled = plain["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    if factors.shape != frequencies.shape or not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} are not Llama 3's, and cannot be served")
    return parameters


def read_tensors(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    """Read every weight under our name, with the rows of queries and keys in our order."""
    for name, stored in file.tensors.items():
        if name != ROPE_FACTORS:
            try:
                yield our_name(name), rows_in_our_order(file, name, read_tensor(file, stored))
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file.path}: {name}: {error}") from error


def rows_in_our_order(file: GGUFFile, name: str, tensor: Tensor) -> Tensor:
    known = NAME.fullmatch(name)
    if not known or known["part"] not in ("attn_q", "attn_k") or file.architecture not in INTERLEAVED:
        return tensor
    num_heads = file.shape("attention.head_count")
    if known["part"] == "attn_k":
        num_heads = file.shape("attention.head_count_kv", num_heads)
    return half_a_head_apart(tensor, num_heads)


def our_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    known = NAME.fullmatch(name)
    if not known:
        return name
    prefix = f"model.layers.{known['layer']}." if known["layer"] else ""
    return f"{prefix}{NAMES.get(known['part'], known['part'])}.{known['kind']}"


def read_tensor(file: GGUFFile, stored: gguf.ReaderTensor) -> Tensor:
    kind = stored.tensor_type.name
    if kind not in KINDS:
        raise CheckpointError(f"{file.path}: {stored.name} is stored as {kind}, which is none of {', '.join(KINDS)}")
    shape = [int(size) for size in reversed(stored.shape)]
    if kind in EXACT:
        numbers = stored.data.reshape(-1).view(f"u{EXACT[kind].itemsize}")
        return torch.from_numpy(np.require(numbers, requirements="A")).view(EXACT[kind]).view(shape)
    return torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type)).view(shape)


def half_a_head_apart(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
