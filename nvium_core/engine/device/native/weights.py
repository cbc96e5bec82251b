"""Where a model's weights are, in the order in which the native functions want them.

Shapes: D width, V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from operator import is_not
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.model.exits import Adapter, Exit
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import NviumForCausalLM


class Pointers:
    """Where tensors are, null for None, for as long as they are needed there."""

    def __init__(self, tensors: Items[Tensor | None]) -> None:
        self._kept = tensors
        self.array = (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


class ExitShape(ctypes.Structure):
    """As in exits.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "router_width", "adapter_width", "vocab_size")),
        *((name, ctypes.c_double) for name in ("eps", "temperature")),
    )

    @classmethod
    def of(cls, model: NviumForCausalLM) -> "ExitShape":
        config = model.config
        return cls(
            config.hidden_size,
            config.router_hidden_size,
            config.adapter_hidden_size,
            config.vocab_size,
            config.rms_norm_eps,
            config.router_temperature,
        )


def is_plain(model: NviumForCausalLM) -> bool:
    """Whether the native functions read every parameter of the model, know its other parts, and run where it is."""
    if model.device.type != "cpu" or model.config.hidden_act != "silu" or model.config.no_rope_layers:
        return False
    if {id(weight) for weight in model.parameters()} != {id(weight) for weight in _read(model)}:
        return False
    precisions = {weight.dtype for weight in _weights(model)}
    return len(precisions) == 1 and (*precisions, *precisions) in PRECISIONS


def narrowest(model: NviumForCausalLM) -> torch.dtype:
    """The precision in which the model's weights can be read without losing a bit of them."""
    dtype = model.lm_head.weight.dtype
    fits = all(torch.equal(weight, weight.bfloat16().to(dtype)) for weight in _weights(model))
    return torch.bfloat16 if (dtype, torch.bfloat16) in PRECISIONS and fits else dtype


def _weights(model: NviumForCausalLM) -> Iterable[Tensor]:
    """All but the routers' last biases, which are more precise than the rest."""
    return (weight for name, weight in model.named_parameters() if not name.endswith("router.head.bias"))


def _read(model: NviumForCausalLM) -> Iterator[Tensor]:
    """Every parameter that the native functions read."""
    yield from (model.model.embed_tokens.weight, model.lm_head.weight)
    for layer in model.model.layers:
        yield from layer_parameters(cast(Layer, layer))
    for exit_ in model.exits:
        yield from filter(partial(is_not, None), exit_parameters(cast(Exit, exit_)))


def layer_parameters(layer: Layer) -> list[Tensor]:
    """In block.h's order."""
    return [
        layer.input_layernorm.weight,
        *(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo"),
        layer.post_attention_layernorm.weight,
        *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
    ]


def exit_parameters(exit_: Exit) -> list[Tensor | None]:
    """All but the head, in exits.h's order; None is what an exit has not."""
    router, adapter = exit_.router, exit_.adapter
    routing: list[Tensor | None] = [None] * 7
    if router is not None:
        layers = (router.fc1, router.fc2, router.norm, router.head)
        routing = [getattr(layer, part) for layer in layers for part in ("weight", "bias") if hasattr(layer, part)]
    adapting = [adapter.up.weight, adapter.down.weight] if isinstance(adapter, Adapter) else [None] * 2
    return [exit_.norm.weight, *routing, *adapting]


def block_weights(model: NviumForCausalLM, block: range, dtype: torch.dtype) -> list[Tensor | None]:
    layers = (cast(Layer, model.model.layers[index]) for index in block)
    return [stored(weight, dtype) for layer in layers for weight in layer_parameters(layer)]


ROUTER_BIAS = 7
"""Where a router's last bias stands among an exit's parameters: it is kept in float32 or better."""


def exit_weights(exit_: Exit, dtype: torch.dtype) -> list[Tensor | None]:
    precise = torch.promote_types(dtype, torch.float32)
    parameters = enumerate(exit_parameters(exit_))
    return [stored(weight, precise if place == ROUTER_BIAS else dtype) for place, weight in parameters]


def all_exits(model: NviumForCausalLM, dtype: torch.dtype) -> list[Pointers]:
    """Of each exit, in exits.h's order and this precision; they share the head."""
    head = stored(model.lm_head.weight, dtype)
    return [Pointers([*exit_weights(cast(Exit, exit_), dtype), head]) for exit_ in model.exits]


def stored(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As the native functions read it: a vector as it is, a matrix in panels, which projection.h explains."""
    if weight is None:
        return None
    weight = weight.detach().to(dtype)
    if weight.dim() == 1:
        return weight.contiguous()
    lanes = 64 // torch.promote_types(dtype, torch.float32).itemsize
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % lanes))
    return filled.view(-1, lanes, weight.shape[1]).transpose(1, 2).contiguous()


def address(numbers: "array[int] | array[float]") -> int:
    """Of the first; the array must be kept as long as that is read, and not grow."""
    return numbers.buffer_info()[0]
