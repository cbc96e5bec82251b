"""Where a model's weights are, in the order in which the native functions want them.

Shapes: D width, V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
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
    """Whether the native functions know all the model's parts, and run where it is."""
    config = model.config
    has_more = config.attention_bias or config.mlp_bias or config.hidden_act != "silu"
    precisions = {weight.dtype for weight in _weights(model)}
    is_of_one_precision = len(precisions) == 1 and (*precisions, *precisions) in PRECISIONS
    return model.device.type == "cpu" and is_of_one_precision and not has_more


def narrowest(model: NviumForCausalLM) -> torch.dtype:
    """The precision in which the model's weights can be read without losing a bit of them."""
    dtype = model.lm_head.weight.dtype
    fits = all(torch.equal(weight, weight.bfloat16().to(dtype)) for weight in _weights(model))
    return torch.bfloat16 if (dtype, torch.bfloat16) in PRECISIONS and fits else dtype


def _weights(model: NviumForCausalLM) -> Iterable[Tensor]:
    """All but the routers' last biases, which are more precise than the rest."""
    return (weight for name, weight in model.named_parameters() if not name.endswith("router.head.bias"))


def block_weights(model: NviumForCausalLM, block: range, dtype: torch.dtype) -> list[Tensor | None]:
    """In block.h's order."""
    return [
        stored(weight, dtype)
        for index in block
        for layer in [cast(Layer, model.model.layers[index])]
        for weight in (
            layer.input_layernorm.weight,
            *(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo"),
            layer.post_attention_layernorm.weight,
            *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
        )
    ]


def exit_weights(exit_: Exit, dtype: torch.dtype) -> list[Tensor | None]:
    """All but the head, in exits.h's order; a router's last bias in float32 or better. None is what an exit has not."""
    router, adapter = exit_.router, exit_.adapter
    routing: list[Tensor | None] = [None] * 6
    bias: Tensor | None = None
    if router is not None:
        layers = (router.fc1, router.fc2)
        routing = [*(part for layer in layers for part in (layer.weight, layer.bias))]
        routing += [router.norm.weight, router.head.weight]
        bias = router.head.bias
    adapting: list[Tensor | None] = [None] * 2
    if isinstance(adapter, Adapter):
        adapting = [adapter.up.weight, adapter.down.weight]
    precise = torch.promote_types(dtype, torch.float32)
    routing = [stored(weight, dtype) for weight in (exit_.norm.weight, *routing)]
    return [*routing, stored(bias, precise), *(stored(weight, dtype) for weight in adapting)]


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
