"""A model's weights, packed in the order in which the native functions read them."""

import ctypes
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any, cast

import torch
from torch import Tensor, cat, nn, zeros_like

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.packing import Packed, Packer, num_bytes, packed_kind
from nvium_core.engine.device.native.structs import make_struct, struct
from nvium_core.model.exits import Adapter, Exit, Gate
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import dequantize

Weight = Tensor | Packed | None


class Structs:
    """A C array of `Layer` or `Exit` of call.h. Keeps the weights alive."""

    def __init__(self, name: str, weights: Items[Mapping[str, Weight]]) -> None:
        self.weights = weights
        made = [make_struct(name, **{field: value_of(weight) for field, weight in each.items()}) for each in weights]
        self.array = (struct(name) * len(made))(*made)


def value_of(weight: Weight) -> Any:
    if isinstance(weight, Packed):
        return make_struct("Matrix", kind=weight.kind, data=weight.data.data_ptr())
    return weight.data_ptr() if isinstance(weight, Tensor) else weight


def implements(model: Nvium) -> bool:
    """Whether the model is on the CPU and the native functions implement all of it."""
    if model.device.type != "cpu":
        return False
    if not {id(weight) for weight in model.parameters()} <= {id(weight) for weight in _read(model)}:
        return False
    # Skip the biases of router heads, which are always in float32 or better.
    precisions = {weight.dtype for name, weight in model.named_parameters() if not name.endswith("router.head.bias")}
    return len(precisions) == 1 and precisions <= PRECISIONS.keys()


def _read(model: Nvium) -> Iterator[Tensor]:
    """Yield every parameter that the native functions read."""
    yield from (model.model.embed_tokens.weight, model.lm_head.weight)
    yield from () if model.model.norm is None else (model.model.norm.weight,)
    layers = (layer_parts(cast(Layer, layer)) for layer in model.model.layers)
    exits = (exit_parts(cast(Exit, exit_)) for exit_ in model.exits)
    yield from (
        weight for exit_ in model.exits if isinstance(exit_.router, Gate) for weight in exit_.router.parameters()
    )
    yield from (part for parts in (*layers, *exits) for part in parts.values() if isinstance(part, Tensor))


def layer_parts(layer: Layer) -> dict[str, Weight]:
    """Return the fields of `Layer` in call.h."""
    attention = layer.self_attn
    return {
        "attention_norm": getattr(layer.input_layernorm, "weight", None),
        **{name: getattr(attention, f"{name}_proj").weight for name in "qkvo"},
        **{f"{name}_bias": getattr(attention, f"{name}_proj").bias for name in "qkv"},
        **{f"{name}_norm": getattr(getattr(attention, f"{name}_norm"), "weight", None) for name in "qk"},
        "attention_post_norm": getattr(layer.post_self_attn_layernorm, "weight", None),
        "mlp_norm": getattr(layer.post_attention_layernorm, "weight", None),
        "mlp_post_norm": getattr(layer.post_mlp_layernorm, "weight", None),
        **{name: getattr(getattr(layer.mlp, f"{name}_proj"), "weight", None) for name in ("gate", "up", "down")},
    }


def exit_parts(exit_: Exit) -> dict[str, Weight]:
    """Return the fields of `Exit` in call.h, without the head. Weights that the exit lacks are None."""
    names = "fc1", "fc1_bias", "fc2", "fc2_bias", "router_norm", "router_head", "router_bias", "up", "down"
    parts: dict[str, Weight] = {"norm": getattr(exit_.norm, "weight", None), **dict.fromkeys(names)}
    router = exit_.router
    if isinstance(router, Gate):  # softmax over (0, x) is sigmoid(x)
        weight, bias = dequantize(router.head.weight), router.head.bias
        parts |= {"router_head": cat([zeros_like(weight), weight]), "router_bias": cat([zeros_like(bias), bias])}
    elif router is not None:
        parts |= {"fc1": router.fc1.weight, "fc1_bias": router.fc1.bias, "fc2": router.fc2.weight}
        parts |= {"fc2_bias": router.fc2.bias, "router_norm": router.norm.weight}
        parts |= {"router_head": router.head.weight, "router_bias": router.head.bias}
    if isinstance(adapter := exit_.adapter, Adapter):
        parts |= {"up": adapter.up.weight, "down": adapter.down.weight}
    return parts


def is_identity(adapter: nn.Module) -> bool:
    """Whether the adapter adds zero, as at the last exit of a retrofitted model."""
    if not isinstance(adapter, Adapter):
        return False
    return not dequantize(adapter.down.weight).any() and bool(dequantize(adapter.up.weight).isfinite().all())


def packed_bytes(model: Nvium, library: ctypes.CDLL) -> int:
    """Estimate the bytes of `pack_weights`. Whether a float32 matrix fits bfloat16 is judged by its first row."""
    parts = (model.model.layers, model.exits, model.lm_head)  # without the embedding, which is not packed
    matrices = {weight for part in parts for weight in part.parameters() if weight.dim() == 2}
    return sum(num_bytes(library, packed_kind(weight[:1]), *weight.shape) for weight in matrices)


def pack_weights(model: Nvium, packer: Packer) -> tuple[Structs, Structs]:
    """Pack the weights of all layers and all exits. The exits share one head.

    Biases and norms are float32 or better. A matrix stays quantized, or gets the narrowest precision that is exact.
    """
    precise = torch.promote_types(model.dtype, torch.float32)

    def pack(weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        return weight.detach().to(precise).contiguous() if weight.dim() == 1 else packer.pack(weight)

    def pack_all(parts: dict[str, Weight]) -> dict[str, Weight]:
        return {name: pack(part) for name, part in parts.items()}

    layers = [pack_all(layer_parts(cast(Layer, layer))) for layer in model.model.layers]
    head, exits = pack(model.lm_head.weight), list[dict[str, Weight]]()
    for exit_ in model.exits:
        parts = exit_parts(cast(Exit, exit_))
        if is_identity(cast(Exit, exit_).adapter):
            parts |= {"up": None, "down": None}
        exits.append({**pack_all(parts), "head": head})
    return Structs("Layer", layers), Structs("Exit", exits)


def address(numbers: "array[int] | array[float]") -> int:
    """Return the address of the first number. It is valid while the array lives and keeps its size."""
    return numbers.buffer_info()[0]
