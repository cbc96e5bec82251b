"""The plan of a model: the layers that a row passes, in order. Made once, when a model is built from its configuration.

PyTorch's layers, the C++ kernels and the CUDA graphs all follow it.
"""

from itertools import pairwise
from typing import NamedTuple

from nvium_core.choices import Activation, Norms, QKNorm
from nvium_core.model.config import NviumConfig


class LayerCall(NamedTuple):
    """One call of a stored layer.

    layer: index of the layer whose weights it uses. Several calls may use the same layer.
    cache: index of its keys and values in the cache. Every call has its own.
    scale: factor of the products of queries and keys; None is 1/√P for heads of size P.
    cap: limit c of the scaled products x, which become c · tanh(x / c); None is no limit.
    rotary: index of the table that rotates queries and keys, or None.
    window: number of last positions, with its own, that a row attends to; None is all.
    norms: the layer's norms.
    qk_norm: norms of queries and keys: of each head, of each after its rotation, of all together, or None.
    activation: that of the gate or, if the layer has none, of `up`.
    is_normed: whether the model's final norm follows, for exits and for the next call.
    """

    layer: int
    cache: int
    scale: float | None = None
    cap: float | None = None
    rotary: int | None = 0
    window: int | None = None
    norms: Norms = "before"
    qk_norm: QKNorm | None = None
    activation: Activation = "silu"
    is_normed: bool = False


Block = tuple[LayerCall, ...]
"""The calls between two exits."""


def is_tied(blocks: list[Block]) -> bool:
    """Whether all blocks call the same layers in the same way, so that one read of the weights can serve all."""
    return len({tuple(call._replace(cache=0) for call in block) for block in blocks}) == 1


def blocks_of(config: NviumConfig) -> list[Block]:
    """Return the calls of each block. A block has the calls between the previous exit and its own exit."""
    num_layers = config.num_hidden_layers
    windows = config.windows or [None] * num_layers
    is_local = [bool(config.window_rope_parameters and window) for window in windows]
    calls = tuple(
        LayerCall(
            layer,
            cache=loop * num_layers + layer,
            scale=config.attention_scale,
            cap=config.attention_cap,
            rotary=None if layer in config.no_rope_layers else int(is_local[layer]),
            window=windows[layer],
            norms=config.layer_norms,
            qk_norm=config.qk_norm_kind if config.qk_norm else None,
            activation=config.hidden_act,
            is_normed=config.norms_loops and layer == num_layers - 1,
        )
        for loop in range(config.num_loops)
        for layer in range(num_layers)
    )
    return [calls[shallow:deep] for shallow, deep in pairwise([0, *(config.exit_layers or [])])]
