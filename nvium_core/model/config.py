"""The configuration of an N-vium: a Llama's plus the depths of its exits. Knows nothing of weights.

`exit_layers` are depths counted in layers: 6 means "after six layers".
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig
from transformers.activations import ACT2FN

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
"""Of each; beyond any real model."""

COUNTS = ("num_hidden_layers", "num_labels")
MAX_COUNT = 10_000
"""Of layers, and of a classifier's labels, which transformers lists for a language model too."""

MAX_NUMBER = 1e30
"""Of what is not counted; an integer of JSON may be beyond floats."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Not `dynamic` and `longrope`, which depend on the longest sequence of a batch."""

FORMAT = 1
"""Of model folders. A field that changes what is computed raises it, so that programs that do not know it refuse."""

ROUTER_WIDTH_RATIO = 0.66  # the paper's router MLP is ⌊0.66 d⌋ wide


@strict
class NviumConfig(LlamaConfig):
    """Llama's fields plus the exits. `exit_layers=None` means one exit, at the end: a univium.

    `router_hidden_size=None` is the paper's ⌊0.66 d⌋; `adapter_hidden_size=None` is the width d, and 0 is no adapters,
    which with a single exit is exactly a Llama. Parts of other makes: `qkv_bias`, biases of queries, keys and values
    but not the output; `qk_norm`, norms of every query and key; `no_rope_layers`, indices of layers without rotary
    embedding. `drafter_hidden_size` is the inner width of a drafter, 0 for none. `default_sampling` is what requests
    get that name none: "original" for a model that exits were added to.
    """

    model_type = "nvium"

    exit_layers: list[int] | tuple[int, ...] | None = None
    router_hidden_size: int | None = None
    adapter_hidden_size: int | None = None
    router_temperature: float | int = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: list[int] | tuple[int, ...] = ()
    drafter_hidden_size: int = 0
    default_sampling: Sampling = "exits"
    nvium_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        check_sizes(vars(self))  # before anything is divided by one
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
        """Part of `@strict` validation: what Llama's own checks leave out."""
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is none of those that load: {', '.join(ACT2FN)}")
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
        for name in ("router_hidden_size", "adapter_hidden_size", "drafter_hidden_size"):
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
