"""The shape of an N-vium: a Llama configuration plus the depths at which it may speak.

Knows nothing of weights. `exit_layers` are depths counted in layers: 6 means "after six layers".
"""

from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig
from transformers.activations import ACT2FN

ROUTER_WIDTH_RATIO = 0.66  # the paper's router MLP is ⌊0.66 d⌋ wide


@strict
class NviumConfig(LlamaConfig):
    """Llama's fields plus the exits. `exit_layers=None` means one exit, at the end: a univium.

    `router_hidden_size=None` takes the paper's ⌊0.66 d⌋; `adapter_hidden_size=None` takes the width d,
    and 0 leaves the adapters out, which with a single exit is exactly a Llama.
    """

    model_type = "nvium"

    exit_layers: list[int] | tuple[int, ...] | None = None
    router_hidden_size: int | None = None
    adapter_hidden_size: int | None = None
    router_temperature: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.exit_layers is None:
            self.exit_layers = [self.num_hidden_layers]
        self.exit_layers = list(self.exit_layers)
        if self.router_hidden_size is None:
            self.router_hidden_size = int(ROUTER_WIDTH_RATIO * self.hidden_size)
        if self.adapter_hidden_size is None:
            self.adapter_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def validate_backbone(self) -> None:
        """Part of `@strict` validation: what Llama's own checks leave out."""
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not a known activation")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(f"rope_type {rope_type!r} depends on the longest sequence of a batch and cannot be served")

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
        if self.router_temperature <= 0:
            raise ValueError(f"router_temperature must be positive, got {self.router_temperature}")

    @property
    def num_exits(self) -> int:
        """N, the final exit included."""
        return len(self.exit_layers or [])

    @property
    def blocks(self) -> list[range]:
        """Block k (0-based) as the range of layer indices it runs: l_k … l_{k+1} - 1."""
        depths = [0, *(self.exit_layers or [])]
        return [range(shallow, deep) for shallow, deep in pairwise(depths)]


def even_exit_layers(num_layers: int, num_exits: int) -> list[int]:
    """The paper's default placement, l_k = k · L / N. L must be a multiple of N."""
    if num_exits < 1 or num_layers % num_exits:
        raise ValueError(f"{num_layers} layers cannot be divided evenly among {num_exits} exits")
    return [k * num_layers // num_exits for k in range(1, num_exits + 1)]
