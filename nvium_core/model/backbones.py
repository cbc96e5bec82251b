"""Configurations of Llama-like models (Mistral, Qwen, SmolLM) as ours.

They share one backbone with optional parts: biases of queries, keys and values, norms of queries and keys, layers
without rotary embedding. Missing fields have the defaults of transformers' configuration for that model.
"""

from collections.abc import Callable
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

Parts = dict[str, Any]

SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)


def no_parts(config: PreTrainedConfig) -> Parts:
    return {}


def qwen2(config: PreTrainedConfig) -> Parts:
    return {"qkv_bias": True}


def qwen3(config: PreTrainedConfig) -> Parts:
    return {"qk_norm": True}


def smollm3(config: PreTrainedConfig) -> Parts:
    return {"no_rope_layers": [layer for layer, has_rope in enumerate(config.no_rope_layers) if not has_rope]}


MAKES: dict[str, Callable[[PreTrainedConfig], Parts]] = {
    "llama": no_parts,
    "mistral": no_parts,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "smollm3": smollm3,
}
"""`model_type` → the parts beyond a Llama's."""


def backbone_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face configuration as `NviumConfig` fields. Raises what transformers' configuration raises."""
    if (quantized := fields.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method")
        known = "float32, float16 and bfloat16, and the groups of GGUF files"
        raise ValueError(f"weights quantised by {method!r} are not supported; supported: {known}")
    config = CONFIG_MAPPING[model_type](**fields)
    shared = {name: getattr(config, name) for name in SHARED_FIELDS if hasattr(config, name)}
    return shared | MAKES[model_type](config) | within_window(config) | {"adapter_hidden_size": 0}


def within_window(config: PreTrainedConfig) -> Parts:
    """Within its window a sliding-window layer attends to everything; longer contexts are not served."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or "sliding_attention" not in kinds:
        return {}
    length = config.max_position_embeddings
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        rope = {"original_max_position_embeddings": length} | rope
    return {"max_position_embeddings": min(window, length), "rope_parameters": rope}
