"""Llama and its relatives, and their configurations as `NviumConfig` fields.

All share one backbone with optional parts, which `NviumConfig` lists. Missing fields get the defaults of transformers'
configuration for that model. Their tensors are arranged as ours are: fused matrices split, rotary pairs half a head
apart, norms whole. Rows of a `StoredMatrix` are chosen, and no number is copied.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from nvium_core.model.config import MAX_SIZES, NviumConfig
from nvium_core.model.stored import StoredMatrix

RowOrder = Literal["pairs", "halves"]
"""Order of a head's query and key rows: the two of a rotary pair side by side, or half a head apart as ours are."""


class Family(NamedTuple):
    """A `model_type` of config.json.

    fields: `NviumConfig` fields that follow from the type and are missing in its files.
    own_fields: returns the `NviumConfig` fields of the type's own fields; raises `ValueError` for an unsupported one.
    config_class: the type whose configuration class is used, if transformers has none for this type.
    names: parts of its folders' tensor names → ours. Fused matrices are `qkv_proj` and `gate_up_proj`.
    rows, adds_one: order of query and key rows in its folders, and whether their norms store w for 1 + w.
    architecture: its `general.architecture` in GGUF files, None if no file is supported.
    is_llama: its GGUF files have all its fields, under Llama's names. Other families need their configuration class,
        which takes a second to import.
    gguf_rows: order of query and key rows in GGUF files.
    gguf_names: parts of GGUF files' tensor names → ours, if not those of other families.
    gguf_fields: names of fields of config.json → names in GGUF files.
    has_windows: its configuration class says which layers have windows and, with "ropes", that their rotary embedding
        is another one. Otherwise all layers of a GGUF file have its window.
    """

    fields: dict[str, Any] = {}
    own_fields: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    config_class: str | None = None
    names: Mapping[str, str] = {}
    rows: RowOrder = "halves"
    adds_one: bool = False
    architecture: str | None = None
    is_llama: bool = False
    gguf_rows: RowOrder = "halves"
    gguf_names: Mapping[str, str] = {}
    gguf_fields: Mapping[str, str] = {}
    has_windows: bool | Literal["ropes"] = False


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
    *("enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection"),
    *("enable_mhc", "enable_depth_attention", "qk_layernorm", "emb_neighbor_num"),
    *("insert_ngram_layer_idx", "ngram_insert_all_layers"),
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


def check_positive(given: Mapping[str, Any], name: str) -> None:
    if not given[name] > 0:
        raise ValueError(f"{name} must be positive, got {given[name]!r}")


def ropes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings of layers with and without a window."""
    parameters = given["rope_parameters"]
    return {"rope_parameters": parameters["full_attention"], "window_rope_parameters": parameters["sliding_attention"]}


def gemma_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 2 (arXiv 2408.00118) and 3 (2503.19786)."""
    if given.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention must be false")
    check_positive(given, "query_pre_attn_scalar")
    is_third = given["model_type"] == "gemma3_text"
    return {
        "hidden_act": given["hidden_activation"],
        "layer_norms": "both",
        "qk_norm": is_third,
        "attention_scale": given["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": None if is_third else given["attn_logit_softcapping"],
        "logit_cap": given["final_logit_softcapping"],
        "embedding_scale": given["hidden_size"] ** 0.5,
        **(ropes(given) if is_third else {}),
    }


def granite_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    check_positive(given, "logits_scaling")
    return {
        "embedding_scale": given["embedding_multiplier"],
        "residual_scale": given["residual_multiplier"],
        "attention_scale": given["attention_multiplier"],
        "logit_scale": 1 / given["logits_scaling"],
    }


def granite_hybrid_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Granite 4, if all layers are attention and none has experts."""
    if given["num_local_experts"]:
        raise ValueError(f"num_local_experts must be 0, got {given['num_local_experts']}; experts are not supported")
    if others := {*given["layer_types"]} & {"linear_attention", "mamba"}:
        raise ValueError(f"layer_types must all be attention, got {min(others)!r}")
    has_rotary = given["position_embedding_type"] == "rope"
    return granite_fields(given) | {
        "intermediate_size": given["shared_intermediate_size"],
        "no_rope_layers": () if has_rotary else [*range(given["num_hidden_layers"])],
    }


def exaone4_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """EXAONE 4 (arXiv 2507.11407): if some layers have windows, the others have no rotary embedding."""
    kinds = given["layer_types"] if given["sliding_window"] else []
    return POST_NORMS | {
        "qk_norm": True,
        "no_rope_layers": [layer for layer, kind in enumerate(kinds) if kind == "full_attention"],
    }


def hunyuan_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Hunyuan's dense models: "dynamic" rotary embeddings with an alpha have a fixed base."""
    rope = dict(given["rope_parameters"])
    if rope.get("rope_type") == "dynamic" and (alpha := rope.get("alpha")):
        size = given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * alpha ** (size / (size - 2))}
    return {"qk_norm": True, "qk_norm_kind": "rotated head", "rope_parameters": rope}


POST_NORMS = {"layer_norms": "after"}
POST_NORM_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
OLMO = POST_NORMS | {"qk_norm": True, "qk_norm_kind": "width"}
GEMMA_NAMES = POST_NORM_NAMES | {"pre_feedforward_layernorm": "post_attention_layernorm"}

FAMILIES = {
    "llama": Family(architecture="llama", is_llama=True, gguf_rows="pairs"),
    "mistral": Family(),  # its GGUF files have the architecture llama
    "qwen2": Family({"qkv_bias": True}, architecture="qwen2", is_llama=True),
    "qwen3": Family({"qk_norm": True}, architecture="qwen3", is_llama=True),
    "smollm3": Family(architecture="smollm3", gguf_rows="pairs"),
    "gemma2": Family(
        own_fields=gemma_fields,
        names=GEMMA_NAMES,
        adds_one=True,
        architecture="gemma2",
        gguf_fields={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        has_windows=True,
    ),
    "gemma3_text": Family(
        own_fields=gemma_fields,
        names=GEMMA_NAMES,
        adds_one=True,
        architecture="gemma3",
        gguf_fields={"final_logit_softcapping": "final_logit_softcapping"},
        has_windows="ropes",
    ),
    "granite": Family(
        own_fields=granite_fields,
        architecture="granite",
        gguf_rows="pairs",
        gguf_fields={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "granitemoehybrid": Family(  # GGUF files: granite
        own_fields=granite_hybrid_fields,
        names={"shared_mlp": "mlp", "input_linear": "gate_up_proj", "output_linear": "down_proj"},
    ),
    "olmo2": Family(OLMO, names=POST_NORM_NAMES, architecture="olmo2"),
    "olmo3": Family(OLMO, ropes, names=POST_NORM_NAMES, has_windows="ropes"),  # GGUF files: olmo2 with a window
    "exaone4": Family(own_fields=exaone4_fields, names=POST_NORM_NAMES, architecture="exaone4", has_windows=True),
    "ernie4_5": Family(
        own_fields=lambda given: {"attention_bias": given["use_bias"], "mlp_bias": given["use_bias"]},
        rows="pairs",
        architecture="ernie4_5",
        gguf_rows="pairs",
    ),
    "glm4": Family(
        {"layer_norms": "both"},
        lambda given: {"attention_bias": False, "qkv_bias": given["attention_bias"]},
        rows="pairs",
        architecture="glm4",
        gguf_rows="pairs",
        gguf_names={"ffn_up": "mlp.gate_up_proj"},
    ),
    "hunyuan_v1_dense": Family(
        own_fields=hunyuan_fields,
        names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
        architecture="hunyuan-dense",
    ),
    "phi3": Family(architecture="phi3", gguf_names={"ffn_up": "mlp.gate_up_proj"}),
    "arcee": Family({"mlp_gated": False}, architecture="arcee", gguf_rows="pairs"),
    "ouro": Family(
        own_fields=ouro_fields,
        config_class="llama",
        names={"input_layernorm_2": "post_self_attn_layernorm", "post_attention_layernorm_2": "post_mlp_layernorm"},
    ),
    "nanbeige": Family(
        own_fields=nanbeige_fields,
        config_class="llama",
        architecture="nanbeige",
        is_llama=True,
        gguf_rows="pairs",
        gguf_fields={name: name for name in ("num_loops", "skip_loop_final_norm")},
    ),
}


def backbone_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a Hugging Face config.json. Exceptions of transformers' configuration class propagate."""
    if (quantized := fields.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method")
        known = "float32, float16, bfloat16 and GGUF"
        raise ValueError(f"weights quantized by {method!r} are not supported; supported: {known}")
    family = FAMILIES[model_type]
    config = transformers.CONFIG_MAPPING[family.config_class or model_type](**fields)
    names = NviumConfig.__annotations__.keys() & type(config).__annotations__.keys()
    shared = {name: getattr(config, name) for name in (*names, "dtype")}
    if shared.get("hidden_act") == "swish":
        shared["hidden_act"] = "silu"
    if "no_rope_layers" in names:  # transformers has flags: 0 for a layer without rotary embedding
        shared["no_rope_layers"] = [layer for layer, has_rope in enumerate(config.no_rope_layers) if not has_rope]
    window = config.sliding_window if "sliding_window" in type(config).__annotations__ else None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in layer_types]
    own = family.own_fields({"model_type": model_type} | vars(config)) if family.own_fields else {}
    return shared | family.fields | own | {"windows": windows if any(windows) else (), "adapter_hidden_size": 0}


def arranged(
    tensors: dict[str, Tensor], config: NviumConfig, rows: RowOrder, *, adds_one: bool = False
) -> dict[str, Tensor]:
    """Arrange tensors under our names.

    rows: order of the query and key rows.
    adds_one: norms store w for 1 + w. The sum is float64, because the stored precision would round it.
    """
    whole = dict(part for name, tensor in tensors.items() for part in split(name, tensor, config))
    for name, tensor in whole.items():
        if rows == "pairs" and module_of(name) in ("q_proj", "k_proj"):
            whole[name] = in_our_order(tensor, config)
        if adds_one and "norm" in name:
            whole[name] = tensor.double() + 1
    return whole


def module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def split(name: str, tensor: Tensor, config: NviumConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a fused matrix or bias, or the tensor itself."""
    head_dim, inner = config.head_dim or 0, config.intermediate_size
    keys = (config.num_key_value_heads or 0) * head_dim
    fused = {
        "qkv_proj": {"q_proj": config.num_attention_heads * head_dim, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    kind = module_of(name)
    parts = fused.get(kind, {})
    if tensor.shape[0] != sum(parts.values()):  # not fused, or of a wrong shape, which the caller will report
        yield name, tensor
        return
    first = 0
    for part, size in parts.items():
        yield name.replace(kind, part), tensor[first : first + size]
        first += size


def in_our_order(tensor: Tensor, config: NviumConfig) -> Tensor:
    """Reorder the rows of each head, or its biases. Only the rotated ones are in pairs."""
    size, rotated = config.head_dim or 0, config.rotary_size
    if len(tensor) % size:
        return tensor  # of a wrong shape, which the caller will report
    order = torch.cat([torch.arange(rotated).view(-1, 2).T.flatten(), torch.arange(rotated, size)])
    rows = (torch.arange(0, len(tensor), size)[:, None] + order).flatten()
    return tensor.at(rows) if isinstance(tensor, StoredMatrix) else tensor[rows]
