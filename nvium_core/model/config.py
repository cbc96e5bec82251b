"""The configuration of an N-vium: Llama's fields plus the exits.

`exit_layers` are depths counted in layer calls: 6 means "after six calls". If the model runs its layers once, a call is
a layer.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from nvium_core.choices import Activation, Norms, QKNorm, RouterKind, Sampling

MAX_WIDTH = 2**24  # upper bound of sizes, far above any real model

WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_SIZES = {
    **dict.fromkeys((*WIDTHS, "max_position_embeddings"), MAX_WIDTH),
    "num_hidden_layers": 10_000,
    "num_loops": 1_000,
    "num_labels": 10_000,  # transformers builds a list of labels for every model
}

MAX_NUMBER = 1e30  # upper bound of other numbers, because a JSON integer may be too large for a float

FACTORS = ("attention_scale", "attention_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale")
ROPE_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rope scalings. `dynamic` and `longrope` are missing, because they depend on a batch's longest sequence."""

FORMAT = 2
"""Version of the model folder's format. Increment it for a new field that changes the computation: an older nvium then
rejects the folder instead of ignoring the field."""


@strict
class NviumConfig(PreTrainedConfig):
    """Configuration of an N-vium. `@strict` checks the types and calls the `validate_…` methods.

    exit_layers: depths of the exits. None is a univium, with one exit after the last layer.
    router_hidden_size: None is the paper's ⌊0.66 d⌋.
    adapter_hidden_size: None is d, 0 is no adapters. A univium without adapters is exactly a Llama.
    qkv_bias: biases of the query, key and value projections, but not of the output projection (Qwen2).
    qk_norm: whether queries and keys have RMSNorms.
    qk_norm_kind: norms of each head, before (Qwen3) or after its rotation (Hunyuan), or of all heads together (OLMo 2).
    no_rope_layers: indices of layers without rotary embedding (SmolLM3).
    windows: for each layer, the number of last positions that a row attends to, or None for all (Mistral, Qwen).
    window_rope_parameters: rotary parameters of layers with a window, if theirs differ (Gemma 3).
    layer_norms: RMSNorms before attention and MLP, after them, before the residual is added (OLMo 2), or both (Ouro).
    mlp_gated: whether the activation of a gate scales the MLP's inner values; otherwise they have the activation.
    attention_scale: factor of the products of queries and keys; None is 1/√head_dim.
    attention_cap, logit_cap: c of the function c · tanh(x / c), which limits these products, and the logits (Gemma 2).
    embedding_scale, residual_scale, logit_scale: factors of embeddings, of what a layer adds, and of logits (Granite).
    num_loops: how often a row passes all layers (looped models).
    norms_loops: whether one RMSNorm, shared by all loops, follows each loop; exits and the next loop read its output
        (Ouro). Otherwise each exit has its own norm, which the next layer does not see.
    router: the paper's MLP, or a linear gate whose sigmoid is w_k (Ouro).
    default_sampling: used for requests that set no `sampling`. Retrofitted and looped models have "original".
    exit_threshold: the threshold of requests with the sampling "threshold" that set none.
    training_tokens: how many tokens `nvium train` has trained the model on, or None if unknown.
    """

    model_type = "nvium"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    head_dim: int | None = None

    exit_layers: list[int] | tuple[int, ...] | None = None
    router_hidden_size: int | None = None
    adapter_hidden_size: int | None = None
    router_temperature: float | int = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: QKNorm = "head"
    no_rope_layers: list[int] | tuple[int, ...] = ()
    windows: list[int | None] | tuple[int | None, ...] = ()
    window_rope_parameters: dict[str, Any] | None = None
    layer_norms: Norms = "before"
    mlp_gated: bool = True
    attention_scale: float | None = None
    attention_cap: float | int | None = None
    logit_cap: float | int | None = None
    embedding_scale: float | int = 1.0
    residual_scale: float | int = 1.0
    logit_scale: float | int = 1.0
    num_loops: int = 1
    norms_loops: bool = False
    router: RouterKind = "mlp"
    default_sampling: Sampling = "exits"
    exit_threshold: float | None = None
    training_tokens: int | None = None
    nvium_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        check_sizes(vars(self))  # before dividing by them
        if self.head_dim is None:
            width, heads = self.hidden_size, self.num_attention_heads
            if width % heads:
                raise ValueError(f"hidden_size ({width}) must be a multiple of num_attention_heads ({heads})")
            self.head_dim = width // heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.exit_layers is None:
            self.exit_layers = [self.num_calls]
        self.exit_layers = list(self.exit_layers)
        if self.router_hidden_size is None:
            self.router_hidden_size = int(0.66 * self.hidden_size)
        if self.adapter_hidden_size is None:
            self.adapter_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def validate_format(self) -> None:
        if not 1 <= self.nvium_format <= FORMAT:
            raise ValueError(f"nvium_format is {self.nvium_format}, but this version of nvium reads up to {FORMAT}")

    def validate_backbone(self) -> None:
        for name in FACTORS:
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_NUMBER:
                raise ValueError(f"{name} must be a positive number, at most {MAX_NUMBER:g}; got {value!r}")
        if not 0 <= self.initializer_range <= 1:
            raise ValueError(f"initializer_range must be between 0 and 1, got {self.initializer_range}")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be finite and not negative, got {self.rms_norm_eps}")
        check_end_token_ids(self.eos_token_id, self.vocab_size)
        if getattr(self, "quantization_config", None) is not None:
            raise ValueError(
                "quantization_config: quantized safetensors are not supported; use unquantized ones or a GGUF file"
            )

    def validate_heads(self) -> None:
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % key_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({key_heads})")

    def validate_windows(self) -> None:
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise ValueError(f"windows must have {self.num_hidden_layers} entries, got {len(self.windows)}")
        for window in self.windows:
            if window is not None and not 1 <= window <= MAX_WIDTH:
                raise ValueError(f"windows must be between 1 and {MAX_WIDTH}, got {window}")

    def validate_rope(self) -> None:
        own, local = dict(self.rope_parameters or {}), self.window_rope_parameters
        for parameters in (own, local or {}):
            check_rope(parameters)
        if local and not {"rope_type", "rope_theta"} <= local.keys():
            raise ValueError("window_rope_parameters must have rope_type and rope_theta")
        if local and local.get("partial_rotary_factor", 1) != own.get("partial_rotary_factor", 1):
            raise ValueError("window_rope_parameters must have the partial_rotary_factor of rope_parameters")
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(f"the rotated part of head_dim ({self.head_dim}) must be even, got {self.rotary_size}")

    def validate_exits(self) -> None:
        if self.num_calls > MAX_SIZES["num_hidden_layers"]:
            raise ValueError(f"num_hidden_layers times num_loops must be at most 10000, got {self.num_calls}")
        depths = [0, *(self.exit_layers or [])]
        if any(shallow >= deep for shallow, deep in pairwise(depths)):
            raise ValueError(f"exit_layers must be positive and strictly increasing, got {self.exit_layers}")
        if depths[-1] != self.num_calls:
            product = "num_hidden_layers" if self.num_loops == 1 else "num_hidden_layers times num_loops"
            raise ValueError(f"the last of exit_layers must be {product} ({self.num_calls}), got {self.exit_layers}")
        if self.norms_loops and any(depth % self.num_hidden_layers for depth in depths):
            raise ValueError(f"exit_layers must be ends of loops if norms_loops is set, got {self.exit_layers}")
        for name, least in (("router_hidden_size", 1), ("adapter_hidden_size", 0)):
            if not least <= (getattr(self, name) or 0) <= MAX_WIDTH:
                raise ValueError(f"{name} must be between {least} and {MAX_WIDTH}, got {getattr(self, name)}")
        if not 0 < self.router_temperature <= MAX_NUMBER:
            raise ValueError(f"router_temperature must be positive and at most {MAX_NUMBER:g}")

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated, the first ones."""
        return round((self.head_dim or 0) * dict(self.rope_parameters or {}).get("partial_rotary_factor", 1.0))

    @property
    def num_exits(self) -> int:
        """N, including the last exit."""
        return len(self.exit_layers or [])

    @property
    def exit_places(self) -> list[str]:
        return exit_places(self.exit_layers or [], self.num_hidden_layers, self.num_loops)

    @property
    def num_calls(self) -> int:
        """Layer calls that a row passes, which is the depth of the last exit."""
        return self.num_hidden_layers * self.num_loops


def exit_places(exit_layers: Sequence[int], num_layers: int, num_loops: int) -> list[str]:
    """Name the places of exits: "loop 2" if a looped model has all exits at ends of loops, else "layer 12"."""
    is_looped = num_loops > 1 and not any(depth % num_layers for depth in exit_layers)
    return [f"loop {depth // num_layers}" if is_looped else f"layer {depth}" for depth in exit_layers]


def univium_config(config: NviumConfig, **changes: Any) -> NviumConfig:
    """Return the configuration of the dense model with the same backbone, with these changes."""
    return NviumConfig.from_dict(config.to_dict() | {"exit_layers": None, "adapter_hidden_size": 0} | changes)


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an integer out of range. `@strict` checks the types."""
    for name, most in MAX_SIZES.items():
        value = fields.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"{name} must be between 1 and {most}, got {value}")
    if fields.get("max_position_embeddings") == 1:
        raise ValueError("max_position_embeddings must be at least 2: one token and its successor")


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an unsupported kind of rotary embedding, or a number out of range."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for name, value in parameters.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (is_number or name in ROPE_NUMBERS) and not (is_number and 0 < value <= MAX_NUMBER):
            raise ValueError(f"{name} must be a positive number, at most {MAX_NUMBER:g}; got {value!r}")
    if parameters.get("partial_rotary_factor", 1) > 1:
        raise ValueError(f"partial_rotary_factor must be at most 1, got {parameters['partial_rotary_factor']}")


def check_end_token_ids(named: Any, vocab_size: int) -> None:
    """Raise `ValueError` for an `eos_token_id` outside the vocabulary."""
    ids = named if isinstance(named, list | tuple) else [] if named is None else [named]
    if any(not isinstance(token_id, int) or not 0 <= token_id < vocab_size for token_id in ids):
        raise ValueError(f"eos_token_id must be an integer in [0, {vocab_size}), or a list of them; got {named}")


def even_exit_layers(num_layers: int, num_exits: int) -> list[int]:
    """Place the exits evenly, as in the paper: l_k = k · L / N. Raise `ValueError` unless N divides L."""
    if num_exits < 1 or num_layers % num_exits:
        raise ValueError(f"{num_layers} layers cannot be divided evenly among {num_exits} exits")
    return [k * num_layers // num_exits for k in range(1, num_exits + 1)]
