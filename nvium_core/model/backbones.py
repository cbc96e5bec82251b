"""Llama and its relatives (Mistral, Qwen, SmolLM, Ouro, Nanbeige), and their configurations as `NviumConfig` fields.

All share one backbone with optional parts: attention biases, query and key norms, layers without rotary embedding.
Missing fields get the defaults of transformers' configuration for that model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import transformers

from nvium_core.model.config import MAX_SIZES, NviumConfig


class Family(NamedTuple):
    """A `model_type` of config.json, which is also the `general.architecture` of GGUF files.

    `fields`: `NviumConfig` fields that follow from the type and are missing in its files. `gguf_rows`: order of the
    query and key rows in GGUF files, None if no file has this architecture. The two rows of a rotary pair are side by
    side ("pairs"), or half a head apart as ours are ("halves"). `no_rope_interval`: 4 if every fourth layer has no
    rotary embedding, which GGUF files do not store; 0 if all layers have one. `own_fields`: returns the `NviumConfig`
    fields of the type's own fields, and raises `ValueError` for one that is not supported; the other fields are
    Llama's. `gguf_fields`: names of its own fields in GGUF files.
    """

    fields: dict[str, Any] = {}
    gguf_rows: Literal["pairs", "halves"] | None = "halves"
    no_rope_interval: int = 0
    own_fields: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    gguf_fields: tuple[str, ...] = ()


def ouro_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ouro (arXiv 2510.25741): every loop ends with a shared norm and an exit with a linear gate."""
    if given.get("use_sliding_window"):
        raise ValueError("use_sliding_window must be false; sliding windows are not supported")
    if others := {*(given.get("layer_types") or ())} - {"full_attention"}:
        raise ValueError(f"layer_types must all be full_attention, got {min(others)!r}")
    if given.get("early_exit_step") is not None:
        raise ValueError("early_exit_step is not supported; use early_exit_threshold")
    loops, threshold = given.get("total_ut_steps", 4), given.get("early_exit_threshold", 1.0)
    check_loops("total_ut_steps", loops)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
        raise ValueError(f"early_exit_threshold must be a finite number above 0, got {threshold!r}")
    depth = given["num_hidden_layers"]
    return {
        "num_loops": loops,
        "exit_layers": [depth * (loop + 1) for loop in range(loops)],
        "layer_norms": "both",
        "norms_loops": True,
        "router": "linear",
        "default_sampling": "threshold" if threshold < 1 else "original",
        "exit_threshold": threshold if threshold < 1 else None,
    }


NANBEIGE_REFUSED = (
    *("enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection", "enable_mhc"),
    *(
        "enable_depth_attention",
        "qk_layernorm",
        "emb_neighbor_num",
        "insert_ngram_layer_idx",
        "ngram_insert_all_layers",
    ),
)


def nanbeige_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Nanbeige 4.2: a Llama whose layers run several times, with one exit after the last loop."""
    if refused := [name for name in NANBEIGE_REFUSED if given.get(name)]:
        raise ValueError(f"{refused[0]} is {given[refused[0]]!r}, which is not supported")
    weights = given.get("loop_loss_weights")
    loops = len(weights) + 1 if weights else given.get("num_loops", 1)
    check_loops("num_loops", loops)
    return {"num_loops": loops, "norms_loops": loops > 1 and not given.get("skip_loop_final_norm", False)}


def check_loops(name: str, loops: object) -> None:
    if isinstance(loops, bool) or not isinstance(loops, int) or not 1 <= loops <= MAX_SIZES["num_loops"]:
        raise ValueError(f"{name} must be between 1 and {MAX_SIZES['num_loops']}, got {loops!r}")


FAMILIES = {
    "llama": Family(gguf_rows="pairs"),
    "mistral": Family(gguf_rows=None),  # its GGUF files have the architecture llama
    "qwen2": Family({"qkv_bias": True}),
    "qwen3": Family({"qk_norm": True}),
    "smollm3": Family(gguf_rows="pairs", no_rope_interval=4),
    "ouro": Family(gguf_rows=None, own_fields=ouro_fields),
    "nanbeige": Family(
        gguf_rows="pairs", own_fields=nanbeige_fields, gguf_fields=("num_loops", "skip_loop_final_norm")
    ),
}


def backbone_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a Hugging Face config.json. Exceptions of transformers' configuration class propagate."""
    if (quantized := fields.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method")
        known = "float32, float16, bfloat16 and GGUF"
        raise ValueError(f"weights quantized by {method!r} are not supported; supported: {known}")
    family = FAMILIES[model_type]
    own = family.own_fields(fields) if family.own_fields else {}
    config = transformers.CONFIG_MAPPING["llama" if family.own_fields else model_type](**fields)
    names = NviumConfig.__annotations__.keys() & type(config).__annotations__.keys()
    shared = {name: getattr(config, name) for name in (*names, "dtype")}
    if "no_rope_layers" in names:  # transformers has flags: 0 for a layer without rotary embedding
        shared["no_rope_layers"] = [layer for layer, has_rope in enumerate(config.no_rope_layers) if not has_rope]
    window = config.sliding_window if "sliding_window" in type(config).__annotations__ else None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in layer_types]
    return shared | family.fields | own | {"windows": windows if any(windows) else (), "adapter_hidden_size": 0}
