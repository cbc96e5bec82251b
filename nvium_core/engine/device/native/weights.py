"""A model's weights, packed in the order in which the native functions read them."""

import ctypes
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import cast

import torch
from torch import Tensor, nn

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.packing import NOTHING, Packed, Packer, num_bytes, packed_kind
from nvium_core.model.exits import Adapter, Exit
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import plain

Weight = Tensor | Packed | bool | None


class Pointers:
    """A C array of pointers to weights. Keeps the weights alive. A packed matrix takes two words: kind and pointer."""

    def __init__(self, weights: Items[Weight]) -> None:
        self.weights = weights
        words = [word for weight in weights for word in _words(weight)]
        self.array = (ctypes.c_void_p * len(words))(*words)


def _words(weight: Weight) -> list[int | None]:
    if isinstance(weight, Packed):
        return [weight.kind, *_words(weight.data)]
    if isinstance(weight, bool):
        return [int(weight)]
    return [None if weight is None else weight.data_ptr()]


def is_plain(model: Nvium) -> bool:
    """Whether the model is on the CPU and the native functions implement all of it."""
    if model.device.type != "cpu":
        return False
    if {id(weight) for weight in model.parameters()} != {id(weight) for weight in _read(model)}:
        return False
    # Skip the biases of router heads, which are always in float32 or better.
    precisions = {weight.dtype for name, weight in model.named_parameters() if not name.endswith("router.head.bias")}
    return len(precisions) == 1 and precisions <= PRECISIONS.keys()


def _read(model: Nvium) -> Iterator[Tensor]:
    """Yield every parameter that the native functions read."""
    yield from (model.model.embed_tokens.weight, model.lm_head.weight)
    layers = (layer_parts(cast(Layer, layer)) for layer in model.model.layers)
    exits = (exit_parts(cast(Exit, exit_)) for exit_ in model.exits)
    yield from (part for parts in (*layers, *exits) for part in parts if isinstance(part, Tensor))


def layer_parts(layer: Layer) -> list[Weight]:
    """Return the fields of `Layer` in call.h."""
    attention = layer.self_attn
    return [
        layer.input_layernorm.weight,
        *(getattr(attention, f"{name}_proj").weight for name in "qkvo"),
        *(getattr(attention, f"{name}_proj").bias for name in "qkv"),
        *(getattr(getattr(attention, f"{name}_norm"), "weight", None) for name in "qk"),
        attention.has_rotary,
        layer.post_attention_layernorm.weight,
        *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
    ]


def exit_parts(exit_: Exit) -> list[Weight]:
    """Return the fields of `Exit` in call.h, without the head."""
    router, adapter = exit_.router, exit_.adapter
    routing: list[Weight] = [NOTHING, None, NOTHING, None, None, NOTHING, None]
    if router is not None:
        layers = (router.fc1, router.fc2, router.norm, router.head)
        routing = [getattr(layer, part) for layer in layers for part in ("weight", "bias") if hasattr(layer, part)]
    adapting = [adapter.up.weight, adapter.down.weight] if isinstance(adapter, Adapter) else [NOTHING] * 2
    return [exit_.norm.weight, *routing, *adapting]


def is_identity(adapter: nn.Module) -> bool:
    """Whether the adapter adds zero, as at the last exit of a retrofitted model."""
    if not isinstance(adapter, Adapter):
        return False
    return not plain(adapter.down.weight).any() and bool(plain(adapter.up.weight).isfinite().all())


def packed_bytes(model: Nvium, library: ctypes.CDLL) -> int:
    """Estimate the bytes of `pack_weights`. Whether a float32 matrix fits bfloat16 is judged by its first row."""
    parts = (model.model.layers, model.exits, model.lm_head)  # without the embedding, which is not packed
    matrices = {weight for part in parts for weight in part.parameters() if weight.dim() == 2}
    return sum(num_bytes(library, packed_kind(weight[:1]), *weight.shape) for weight in matrices)


def pack_weights(model: Nvium, packer: Packer) -> tuple[Pointers, Pointers]:
    """Pack the weights of all layers and all exits. The exits share one head.

    Biases and norms are float32 or better. A matrix stays quantized, or gets the narrowest precision that is exact.
    """
    precise = torch.promote_types(model.dtype, torch.float32)

    def packed(weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        return weight.detach().to(precise).contiguous() if weight.dim() == 1 else packer.pack(weight)

    layers = [packed(part) for layer in model.model.layers for part in layer_parts(cast(Layer, layer))]
    head, exits = packed(model.lm_head.weight), list[Weight]()
    for exit_ in model.exits:
        parts = exit_parts(cast(Exit, exit_))
        if is_identity(cast(Exit, exit_).adapter):
            parts[-2:] = NOTHING, NOTHING
        exits += [*(packed(part) for part in parts), head]
    return Pointers(layers), Pointers(exits)


def address(numbers: "array[int] | array[float]") -> int:
    """Return the address of the first number. It is valid while the array lives and keeps its size."""
    return numbers.buffer_info()[0]
