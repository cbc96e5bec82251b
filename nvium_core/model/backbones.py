"""Llama and its relatives (Mistral, Qwen, SmolLM), and their configurations as `NviumConfig` fields.

All share one backbone with optional parts: attention biases, query and key norms, layers without rotary embedding.
Missing fields get the defaults of transformers' configuration for that model.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import transformers

from nvium_core.model.config import NviumConfig


class Family(NamedTuple):
    """A `model_type` of config.json, which is also the `general.architecture` of GGUF files.

    `fields`: `NviumConfig` fields that follow from the type and are missing in its files. `gguf_rows`: order of the
    query and key rows in GGUF files, None if no file has this architecture. The two rows of a rotary pair are side by
    side ("pairs"), or half a head apart as ours are ("halves"). `no_rope_interval`: 4 if every fourth layer has no
    rotary embedding, which GGUF files do not store; 0 if all layers have one.
    """

    fields: dict[str, Any] = {}
    gguf_rows: Literal["pairs", "halves"] | None = "halves"
    no_rope_interval: int = 0


FAMILIES = {
    "llama": Family(gguf_rows="pairs"),
    "mistral": Family(gguf_rows=None),  # its GGUF files have the architecture llama
    "qwen2": Family({"qkv_bias": True}),
    "qwen3": Family({"qk_norm": True}),
    "smollm3": Family(gguf_rows="pairs", no_rope_interval=4),
}


def backbone_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a Hugging Face config.json. Exceptions of transformers' configuration class propagate."""
    if (quantized := fields.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method")
        known = "float32, float16, bfloat16 and GGUF"
        raise ValueError(f"weights quantized by {method!r} are not supported; supported: {known}")
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    names = NviumConfig.__annotations__.keys() & type(config).__annotations__.keys()
    shared = {name: getattr(config, name) for name in (*names, "dtype")}
    if "no_rope_layers" in names:  # transformers has flags: 0 for a layer without rotary embedding
        shared["no_rope_layers"] = [layer for layer, has_rope in enumerate(config.no_rope_layers) if not has_rope]
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    has_windows = "sliding_window" in type(config).__annotations__ and "sliding_attention" in layer_types
    window = config.sliding_window if has_windows else None
    return shared | FAMILIES[model_type].fields | within_window(shared, window) | {"adapter_hidden_size": 0}


def within_window(fields: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """Limit the context to the length of the sliding window. Sliding attention then equals full attention."""
    if not window:
        return {}
    length, rope = fields["max_position_embeddings"], fields.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        rope = {"original_max_position_embeddings": length} | rope
    return {"max_position_embeddings": min(window, length), "rope_parameters": rope}
