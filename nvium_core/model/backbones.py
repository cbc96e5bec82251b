"""Configurations of Llama and its relatives (Mistral, Qwen, SmolLM) as `NviumConfig` fields.

All share one backbone with optional parts: attention biases, query and key norms, layers without rotary embedding.
Missing fields get the defaults of transformers' configuration for that model.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from nvium_core.model.config import NviumConfig

BACKBONES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {},
}
"""Supported `model_type` → `NviumConfig` fields that follow from the type and are missing in config.json."""


def backbone_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a Hugging Face config.json. Exceptions of transformers' configuration class propagate."""
    if (quantized := fields.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method")
        known = "float32, float16, bfloat16 and GGUF"
        raise ValueError(f"weights quantized by {method!r} are not supported; supported: {known}")
    config = CONFIG_MAPPING[model_type](**fields)
    names = NviumConfig.__annotations__.keys() & type(config).__annotations__.keys()
    shared = {name: getattr(config, name) for name in (*names, "dtype")}
    if model_type == "smollm3":  # its `no_rope_layers` are flags: 0 for a layer without rotary embedding
        shared["no_rope_layers"] = [layer for layer, has_rope in enumerate(config.no_rope_layers) if not has_rope]
    return shared | BACKBONES[model_type] | _within_window(config) | {"adapter_hidden_size": 0}


def _within_window(config: PreTrainedConfig) -> dict[str, Any]:
    """Limit the context to the length of the sliding window. Sliding attention then equals full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or "sliding_attention" not in layer_types:
        return {}
    length = config.max_position_embeddings
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        rope = {"original_max_position_embeddings": length} | rope
    return {"max_position_embeddings": min(window, length), "rope_parameters": rope}
