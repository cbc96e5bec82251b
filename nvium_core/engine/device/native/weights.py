"""Where a model's weights are, in the order in which the native functions want them.

Shapes: D width, V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from nvium_core.engine.device.native.packing import KINDS, NOTHING, Layout, Packed, pack, pack_groups
from nvium_core.model.exits import Adapter, Exit
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.quantized import groups_of

Weight = Tensor | Packed | bool | None


class Pointers:
    """Where tensors are, null for None, for as long as they are needed there; before a matrix stands its kind. A truth
    value stands for itself."""

    def __init__(self, weights: Items[Weight]) -> None:
        self._kept = weights
        words = [word for weight in weights for word in _words(weight)]
        self.array = (ctypes.c_void_p * len(words))(*words)


def _words(weight: Weight) -> list[int | None]:
    if isinstance(weight, Packed):
        return [weight.kind, *_words(weight.data)]
    if isinstance(weight, bool):
        return [int(weight)]
    return [None if weight is None else weight.data_ptr()]


class ExitShape(ctypes.Structure):
    """As in exits.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "router_width", "adapter_width", "vocab_size")),
        *((name, ctypes.c_double) for name in ("eps", "temperature")),
    )

    @classmethod
    def of(cls, model: Nvium) -> "ExitShape":
        config = model.config
        return cls(
            config.hidden_size,
            config.router_hidden_size,
            config.adapter_hidden_size,
            config.vocab_size,
            config.rms_norm_eps,
            config.router_temperature,
        )


def is_plain(model: Nvium) -> bool:
    """Whether the native functions read every parameter of the model, know its other parts, and run where it is."""
    if model.device.type != "cpu" or model.config.hidden_act != "silu":
        return False
    if {id(weight) for weight in model.parameters()} != {id(weight) for weight in _read(model)}:
        return False
    precisions = {weight.dtype for weight in _weights(model)}
    return len(precisions) == 1 and precisions <= KINDS.keys()


def narrowed(weight: Tensor) -> Tensor:
    """In bfloat16, if that loses no bit of it."""
    narrow = weight.bfloat16()
    return narrow if weight.dtype != torch.float64 and torch.equal(narrow.to(weight.dtype), weight) else weight


def _weights(model: Nvium) -> Iterable[Tensor]:
    """All but the routers' last biases, which are more precise than the rest."""
    return (weight for name, weight in model.named_parameters() if not name.endswith("router.head.bias"))


def _read(model: Nvium) -> Iterator[Tensor]:
    """Every parameter that the native functions read."""
    yield from (model.model.embed_tokens.weight, model.lm_head.weight)
    parts: list[Items[Tensor | bool | None]] = [layer_parts(cast(Layer, layer)) for layer in model.model.layers]
    parts += [exit_parameters(cast(Exit, exit_)) for exit_ in model.exits]
    for part in chain.from_iterable(parts):
        if isinstance(part, Tensor):
            yield part


def layer_parts(layer: Layer) -> list[Tensor | bool | None]:
    """Parameters, and whether rotary embedding is one of its parts, in block.h's order; None is what it has not."""
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


EXIT_MATRICES = (1, 3, 6, 8, 9)
"""Where matrices stand among an exit's parameters."""

ADAPTER_MATRICES = EXIT_MATRICES[-2:]


def exit_parameters(exit_: Exit) -> list[Tensor | None]:
    """All but the head, in exits.h's order; None is what an exit has not."""
    router, adapter = exit_.router, exit_.adapter
    routing: list[Tensor | None] = [None] * 7
    if router is not None:
        layers = (router.fc1, router.fc2, router.norm, router.head)
        routing = [getattr(layer, part) for layer in layers for part in ("weight", "bias") if hasattr(layer, part)]
    adapting = [adapter.up.weight, adapter.down.weight] if isinstance(adapter, Adapter) else [None] * 2
    return [exit_.norm.weight, *routing, *adapting]


def adds_nothing(adapter: nn.Module) -> bool:
    """An adapter that is the identity, as the last exit's of a retrofitted model."""
    return isinstance(adapter, Adapter) and not adapter.down.weight.any() and bool(adapter.up.weight.isfinite().all())


class Store:
    """A model's weights as one build reads them: vectors in float32 or better, matrices in groups if their layer holds
    some, or else in the narrowest precision that loses nothing."""

    def __init__(self, model: Nvium, vector_bytes: int) -> None:
        self._model = model
        self._precise = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        self._layout = Layout.of(vector_bytes, self._precise)
        layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
        is_grouped = self._precise == torch.float32
        self._groups = {id(layer.weight): groups for layer in layers if is_grouped and (groups := groups_of(layer))}

    def block(self, block: range) -> Pointers:
        layers = (cast(Layer, self._model.model.layers[index]) for index in block)
        return Pointers([self._stored(weight) for layer in layers for weight in layer_parts(layer)])

    def exits(self) -> list[Pointers]:
        """Of each exit; they share the head."""
        head = self._stored(self._model.lm_head.weight)
        return [Pointers([*self._exit(cast(Exit, exit_)), head]) for exit_ in self._model.exits]

    def _exit(self, exit_: Exit) -> Iterator[Weight]:
        left_out = ADAPTER_MATRICES if adds_nothing(exit_.adapter) else ()
        for place, weight in enumerate(exit_parameters(exit_)):
            is_nothing = place in left_out or (weight is None and place in EXIT_MATRICES)
            yield NOTHING if is_nothing else self._stored(weight)

    def _stored(self, weight: Tensor | bool | None) -> Weight:
        if weight is None or isinstance(weight, bool):
            return weight
        if weight.dim() == 1:
            return weight.detach().to(self._precise).contiguous()
        if groups := self._groups.get(id(weight)):
            return pack_groups(groups, self._layout)
        return pack(narrowed(weight.detach()), self._layout)


def address(numbers: "array[int] | array[float]") -> int:
    """Of the first; the array must be kept as long as that is read, and not grow."""
    return numbers.buffer_info()[0]
