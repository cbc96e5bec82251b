"""Reads the configuration and weights of a GGUF file. `nvium_core.text.gguf_tokenizer` reads the tokenizer."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nvium_core.errors import CheckpointError
from nvium_core.model.backbones import FAMILIES, Family, arranged, backbone_fields
from nvium_core.model.checkpoint import Checkpoint, final_norm, stored_floats, unreadable
from nvium_core.model.config import NviumConfig, check_sizes
from nvium_core.model.gguf_header import FileTensor, UnsupportedError, read_header
from nvium_core.model.stored import FLOATS, StoredMatrix

logger = logging.getLogger(__name__)

ARCHITECTURES = {family.architecture: name for name, family in FAMILIES.items() if family.architecture}
"""`general.architecture` → the `model_type` of such folders."""

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
"""Our field names → the file's, without the architecture prefix."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>\w+)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"

YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
READ = {*SHAPE.values(), "attention.value_length", "attention.sliding_window", "attention.sliding_window_pattern"}
READ |= {f"rope.{name}" for name in ("dimension_count", "freq_base", "freq_base_swa", "scale_linear")}
READ |= {"rope.scaling.type", "rope.scaling.factor", *YARN.values()}
READ |= {"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}  # the last two are harmless
NEUTRAL: dict[str, Any] = {"attention.causal": True} | dict.fromkeys(
    ("attention.output_scale", "embedding_scale", "logit_scale", "residual_scale", "rope.scaling.attn_factor"), 1.0
)
"""Unsupported field → the value that has no effect. A file with a different value is rejected. Zero is accepted."""

SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Sampling parameters → the file's names, without the prefix `general.sampling`."""

ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
NAMED_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Tokens that always end a text, in addition to those that a file names. From llama.cpp (src/llama-vocab.cpp)."""

EXACT = {kind.name: dtype for dtype, kind in FLOATS.items() if dtype != torch.float64}
"""Types of unquantized tensors."""

KINDS = (
    *EXACT,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""Types of supported matrices."""

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose attention scale is not 1/√head_dim. Files do not store the scale (llama.cpp)."""

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3["original_max_position_embeddings"] = 8192
"""Of Llama 3.1 and later. GGUF files have only factors that are computed from these numbers."""


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    fields: dict[str, Any]
    tensors: dict[str, FileTensor]

    @cached_property
    def architecture(self) -> str:
        name = str(self.fields.get("general.architecture"))
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.path}: architecture {name!r} is not supported; supported: {known}")
        return name

    @property
    def model_type(self) -> str:
        is_olmo3 = self.architecture == "olmo2" and self.number("attention.sliding_window")
        return "olmo3" if is_olmo3 else ARCHITECTURES[self.architecture]

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def shape(self, name: str, default: Any = None) -> Any:
        """Return the field `ARCHITECTURE.name`, such as `llama.block_count`, or `default` if the field is missing."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return the field `ARCHITECTURE.name` as a number, 0 if it is missing. Raise `CheckpointError` otherwise."""
        value = self.shape(name, default)
        if not isinstance(value, int | float | None):
            raise CheckpointError(f"{self.path}: {self.architecture}.{name} must be a number, got {_short(value)}")
        return float(value or 0)

    @property
    def matrix_kinds(self) -> set[str]:
        return {tensor.kind.name for tensor in self.tensors.values() if len(tensor.shape) > 1}

    @property
    def is_quantized(self) -> bool:
        return not self.matrix_kinds <= EXACT.keys()


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Raise `CheckpointError` if it is not valid."""
    return _open(path, path.stat().st_mtime_ns, path.stat().st_size)


@lru_cache(1)
def _open(path: Path, *_written: int) -> GGUFFile:
    """Open a file. Cached, because the tokenizer and the weights use the same file."""
    try:
        file = GGUFFile(path, *read_header(path))
    except UnsupportedError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # damaged files raise various exceptions in the reader
        raise unreadable(path, error) from error
    if file.fields.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: is a shard of a split model; merge the shards with llama-gguf-split --merge")
    return file


def close_gguf() -> None:
    """Close the cached file, whose vocabulary takes much memory."""
    _open.cache_clear()


def read_gguf(path: Path, config: NviumConfig | None = None) -> Checkpoint:
    """Read configuration and weights. The matrices stay as they are stored."""
    file = open_gguf(path)
    config = config or read_config(file)  # before the tensors, whose shapes may contradict it
    dtypes = () if file.is_quantized else (EXACT[kind] for kind in file.matrix_kinds)
    return Checkpoint(
        config=config,
        tensors=arranged(dict(read_tensors(file, config)), config, file.family.gguf_rows),
        folder=path,
        dtype=reduce(torch.promote_types, dtypes, torch.bfloat16),
        sampling=sampling_fields(file),
    )


def sampling_fields(file: GGUFFile) -> dict[str, float]:
    """Read the suggested sampling parameters. Raise `CheckpointError` for one that is not a number."""
    found = {ours: file.fields.get(f"general.sampling.{theirs}") for ours, theirs in SAMPLING.items()}
    try:
        return {name: float(str(np.float32(value))) for name, value in found.items() if value is not None}
    except ValueError as error:
        raise CheckpointError(f"{file.path}: general.sampling: {error}") from error


def read_config(file: GGUFFile) -> NviumConfig:
    """Read the configuration. Raise `CheckpointError` for unsupported fields that would change the computation."""
    prefix = f"{file.architecture}."
    names = (name for name in file.fields if name.startswith(prefix))
    for field in {name.removeprefix(prefix) for name in names} - READ - {*file.family.gguf_fields.values()}:
        value = file.shape(field)
        if value and value != NEUTRAL.get(field):
            raise CheckpointError(f"{file.path}: {prefix}{field} is {value!r}, which is not supported")
    try:
        return NviumConfig(**_fields(file))
    except CheckpointError:
        raise
    except Exception as error:  # invalid values raise various exceptions
        raise CheckpointError(f"{file.path}: {error.__cause__ or error}") from error


def _shape(file: GGUFFile) -> dict[str, Any]:
    """Return the sizes. Raise `CheckpointError` for one that is missing or not a positive integer."""
    fields = {ours: value for ours, theirs in SHAPE.items() if (value := file.shape(theirs)) is not None}
    fields.setdefault("vocab_size", len(file.fields.get("tokenizer.ggml.tokens", ())))
    known = {*fields, "num_key_value_heads", "head_dim"}
    if missing := [f"{file.architecture}.{theirs}" for ours, theirs in SHAPE.items() if ours not in known]:
        raise CheckpointError(f"{file.path}: missing {', '.join(missing)}")
    fields["rms_norm_eps"] = file.number(SHAPE["rms_norm_eps"])
    for name, count in fields.items():
        if name != "rms_norm_eps" and (not isinstance(count, int) or count < 1):
            field = f"{file.architecture}.{SHAPE[name]}"
            raise CheckpointError(f"{file.path}: {field} must be a positive integer, got {_short(count)}")
    check_sizes(fields)  # before lists of these lengths are built
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if fields["hidden_size"] % fields["num_attention_heads"] == 0:
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    return fields


def _fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `NviumConfig`, by those that config.json would have."""
    family, fields = file.family, _shape(file)
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields |= {name: value for name, theirs in family.gguf_fields.items() if (value := file.shape(theirs)) is not None}
    fields |= _ropes(file, fields)
    window = int(file.number("attention.sliding_window")) or None
    if family.has_windows:
        fields |= _windows(file, window, fields["num_hidden_layers"])
    if layers := GEMMA_27B_LAYERS.get(file.architecture):
        is_27b = fields["num_hidden_layers"] == layers
        head_dim = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields.get("head_dim")
        fields["query_pre_attn_scalar"] = head_dim
    if family.is_llama:
        own = family.own_fields(fields) if family.own_fields else {}
        made = fields | family.fields | own | {"adapter_hidden_size": 0}
    else:
        made = backbone_fields(file.model_type, fields)
    made |= _special_tokens(file)
    has_all_biases = "blk.0.attn_output.bias" in file.tensors
    made |= {"attention_bias": has_all_biases, "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}
    made["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors and not has_all_biases
    if file.shape("rope.scaling.finetuned") is False and file.architecture == "granite":  # as in llama.cpp
        made["no_rope_layers"] = [*range(fields["num_hidden_layers"])]
    if window and not family.has_windows:
        made["windows"] = [window] * fields["num_hidden_layers"]
    return made


def _windows(file: GGUFFile, window: int | None, num_layers: int) -> dict[str, Any]:
    """Return the window, and which layers have it, if the file says so: a flag of each, or n if every n-th has not."""
    pattern = file.shape("attention.sliding_window_pattern", [])
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) not in (0, num_layers):
        name = f"{file.architecture}.attention.sliding_window_pattern"
        raise CheckpointError(
            f"{file.path}: {name} must be a positive integer or {num_layers} flags, got {pattern!r:.60}"
        )
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    return {"sliding_window": window} | ({"layer_types": kinds} if window and kinds else {})


def _ropes(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, as config.json has them: by kind of layer, if these differ."""
    rope = _rope(file, fields)
    if file.family.has_windows != "ropes":
        return {"rope_parameters": rope}
    base = file.number("rope.freq_base_swa") or (10_000.0 if file.architecture == "gemma3" else rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _short(value: Any) -> str:
    return "a list, one value per layer" if isinstance(value, list) else repr(value)


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Return the ids of the tokens that begin, pad and end a text."""
    named: dict[str, Any] = {
        name: file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", *ENDS)
    }
    ids = {
        token: index for index, token in enumerate(file.fields.get("tokenizer.ggml.tokens", ())) if token in NAMED_ENDS
    }
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys():
        ids.pop("<|end|>", None)  # in these formats, <|end|> does not end the answer, only a message (llama.cpp)
    ends = sorted({*ids.values(), *(named[name] for name in ENDS)} - {None})
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": named["bos"], "eos_token_id": end, "pad_token_id": named["padding"]}


def _rope(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Read the rotary parameters. A scaling factor without a type is linear. Old files have `rope.scale_linear`."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    if (size := file.shape("attention.value_length", head_dim)) != head_dim:
        raise CheckpointError(f"{file.path}: attention.value_length must be the head size, {head_dim}, got {size}")
    base = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10_000.0)}
    rotated = file.number("rope.dimension_count", head_dim)
    if rotated != head_dim or file.architecture == "glm4":  # whose default is half of the head
        base["partial_rotary_factor"] = rotated / head_dim
    kind = file.shape("rope.scaling.type", "linear")
    factor = file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0
    is_scaled = kind != "none" and factor != 1
    if ROPE_FACTORS in file.tensors and not is_scaled:
        return _llama_3_rope(file, base, head_dim)
    if kind == "yarn" and ROPE_FACTORS not in file.tensors:
        numbers = {name: file.number(theirs) for name, theirs in YARN.items() if file.shape(theirs) is not None}
        return base | {"rope_type": "yarn", "factor": factor} | numbers if is_scaled else base
    if ROPE_FACTORS in file.tensors or kind not in ("none", "linear"):
        known = "none, linear, yarn, Llama 3's factors"
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} by {factor:g} is not supported; supported: {known}")
    return base | {"rope_type": "linear", "factor": factor} if is_scaled else base


def _llama_3_rope(file: GGUFFile, base: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return Llama 3's rotary parameters. Raise `CheckpointError` if their factors differ from the file's."""
    factors = read_tensor(file, file.tensors[ROPE_FACTORS]).float()
    parameters = base | LLAMA_3 | {"factor": factors.max().item()}
    config = NviumConfig(head_dim=head_dim, rope_parameters=parameters)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    unscaled = base["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    if factors.shape != frequencies.shape or not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} must have the factors of a llama3 rope scaling")
    return parameters


def read_tensors(file: GGUFFile, config: NviumConfig) -> Iterator[tuple[str, Tensor]]:
    """Read every weight under our name."""
    for name, stored in file.tensors.items():
        if name != ROPE_FACTORS:
            try:
                yield our_name(name, config, file.family.gguf_names), read_tensor(file, stored)
            except CheckpointError:
                raise
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file.path}: {name}: {error}") from error


def our_name(name: str, config: NviumConfig, own_names: Mapping[str, str] = {}) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`. Return unknown names unchanged."""
    known = NAME.fullmatch(name)
    if not known:
        return name
    prefix = f"model.layers.{known['layer']}." if known["layer"] else ""
    ours = f"{prefix}{(NAMES | {**own_names}).get(known['part'], known['part'])}.{known['kind']}"
    return ours.replace("model.norm.", final_norm(config))


def read_tensor(file: GGUFFile, stored: FileTensor) -> Tensor:
    """Return a stored matrix, or an ordinary vector."""
    kind, place = stored.kind, f"{file.path}: {stored.name}"
    if kind.name not in KINDS:
        raise CheckpointError(f"{place} has type {kind.name}; supported: {', '.join(KINDS)}")
    if kind.name not in EXACT and len(stored.shape) == 1:
        raise CheckpointError(f"{place} has type {kind.name}, but is a vector; supported: {', '.join(EXACT)}")
    if kind.name not in EXACT:
        return StoredMatrix(stored.content.view(stored.shape[0], -1), kind, place=place)
    return stored_floats(stored.content.view(EXACT[kind.name]).view(stored.shape), place)
