"""The configuration of an N-vium: a Llama's plus the depths of its exits. Knows nothing of weights.

`exit_layers` are depths counted in layers: 6 means "after six layers".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from nvium_core.choices import Sampling

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
MAX_SIZE = 2**24
"""Largest size of each kind, beyond any real model."""

COUNTS = ("num_hidden_layers", "num_labels")
MAX_COUNT = 10_000
"""Largest number of layers, and of classifier labels, which transformers lists even for language models."""

MAX_NUMBER = 1e30
"""Largest other number; a JSON integer may exceed a float."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Not `dynamic` and `longrope`, which depend on the longest sequence of a batch."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
}
"""Activations by `hidden_act`."""

FORMAT = 1
"""Format of model folders. A new field that changes the computation raises it, so that older programs refuse the
folder."""

ROUTER_WIDTH_RATIO = 0.66  # the paper's router MLP is ⌊0.66 d⌋ wide


@strict
class NviumConfig(PreTrainedConfig):
    """Llama's fields plus the exits. `exit_layers=None` means one exit, at the end: a univium.

    `router_hidden_size=None` is the paper's ⌊0.66 d⌋; `adapter_hidden_size=None` is the width d, and 0 is no adapters,
    which with a single exit is exactly a Llama. Parts of other makes: `qkv_bias`, biases of queries, keys and values
    but not the output; `qk_norm`, norms of every query and key; `no_rope_layers`, indices of layers without rotary
    embedding. `default_sampling` is for requests that name none: "original" for a retrofitted model.
    """

    model_type = "nvium"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
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
    no_rope_layers: list[int] | tuple[int, ...] = ()
    default_sampling: Sampling = "exits"
    nvium_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        check_sizes(vars(self))  # before they become divisors
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.exit_layers is None:
            self.exit_layers = [self.num_hidden_layers]
        self.exit_layers = list(self.exit_layers)
        if self.router_hidden_size is None:
            self.router_hidden_size = int(ROUTER_WIDTH_RATIO * self.hidden_size)
        if self.adapter_hidden_size is None:
            self.adapter_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def validate_format(self) -> None:
        """Part of `@strict` validation."""
        if self.nvium_format != FORMAT:
            raise ValueError(f"nvium_format {self.nvium_format} is another version's; this one reads {FORMAT}")

    def validate_backbone(self) -> None:
        """Part of `@strict` validation."""
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        if not 0 <= self.initializer_range <= 1:
            raise ValueError(f"initializer_range must be between 0 and 1, got {self.initializer_range}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of the {self.num_attention_heads} attention heads"
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope_type!r} is none of those that can be served: {', '.join(ROPE_TYPES)}")
        if (self.rope_parameters or {}).get("partial_rotary_factor", 1) != 1:
            raise ValueError("partial_rotary_factor: rotary embeddings of a part of each head cannot be served")

    def validate_heads(self) -> None:
        """Part of `@strict` validation."""
        heads, shared = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % shared:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({shared})")
        if (self.head_dim or 0) % 2:
            raise ValueError(f"head_dim must be even, as positions turn pairs, got {self.head_dim}")

    def validate_numbers(self) -> None:
        """Part of `@strict` validation: values that would give NaN, or an end-of-text that never comes."""
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be finite and not negative, got {self.rms_norm_eps}")
        for name, value in rope_numbers(self.rope_parameters or {}):
            if not 0 < value <= MAX_NUMBER:
                raise ValueError(f"{name} must be positive and at most {MAX_NUMBER:g}")
        check_end_token_ids(self.eos_token_id, self.vocab_size)
        if getattr(self, "quantization_config", None) is not None:
            raise ValueError("quantization_config: weights that others have quantized are not read")

    def validate_exits(self) -> None:
        """Part of `@strict` validation: exits strictly increase and the last one is at full depth."""
        depths = [0, *(self.exit_layers or [])]
        if any(shallow >= deep for shallow, deep in pairwise(depths)):
            raise ValueError(f"exit_layers must be positive and strictly increasing, got {self.exit_layers}")
        if depths[-1] != self.num_hidden_layers:
            raise ValueError(
                f"the last of exit_layers must be num_hidden_layers ({self.num_hidden_layers}), got {self.exit_layers}"
            )
        if (self.router_hidden_size or 0) < 1:
            raise ValueError(f"router_hidden_size must be positive, got {self.router_hidden_size}")
        if not 0 < self.router_temperature <= MAX_NUMBER:
            raise ValueError(f"router_temperature must be positive and at most {MAX_NUMBER:g}")
        for name in ("router_hidden_size", "adapter_hidden_size"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_SIZE:
                raise ValueError(f"{name} must be between 0 and {MAX_SIZE}, got {getattr(self, name)}")

    @property
    def num_exits(self) -> int:
        """N, the final exit included."""
        return len(self.exit_layers or [])

    @property
    def blocks(self) -> list[range]:
        """Block k (0-based) as the range of layer indices it runs: l_k … l_{k+1} - 1."""
        depths = [0, *(self.exit_layers or [])]
        return [range(shallow, deep) for shallow, deep in pairwise(depths)]


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` for sizes that cannot be built or would exhaust memory."""
    for name in SIZES:
        require_between(name, fields.get(name), MAX_SIZE)
    for name in COUNTS:
        require_between(name, fields.get(name), MAX_COUNT)
    if fields.get("max_position_embeddings") == 1:
        raise ValueError("max_position_embeddings must be at least 2, a token and the one behind it")


def require_between(name: str, value: object, most: int) -> None:
    """Raise `ValueError` for a size out of range; missing values and other types are checked elsewhere."""
    if isinstance(value, int) and not 1 <= value <= most:
        raise ValueError(f"{name} must be between 1 and {most}, got {value}")


def rope_numbers(parameters: Any) -> Iterator[tuple[str, float]]:
    """All numbers that determine rotary angles, by name."""
    for name, value in parameters.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def check_end_token_ids(named: int | list[int] | None, vocab_size: int) -> None:
    """Raise `ValueError` for an end-of-text outside the vocabulary."""
    for token_id in [named] if isinstance(named, int) else named or []:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"eos_token_id {token_id} is outside the vocabulary of {vocab_size} tokens")


def even_exit_layers(num_layers: int, num_exits: int) -> list[int]:
    """The paper's default placement, l_k = k · L / N. L must be a multiple of N."""
    if num_exits < 1 or num_layers % num_exits:
        raise ValueError(f"{num_layers} layers cannot be divided evenly among {num_exits} exits")
    return [k * num_layers // num_exits for k in range(1, num_exits + 1)]


AutoConfig.register("nvium", NviumConfig)
