"""An exit's answers for a few fronts, in two native calls: what its router says, and its logits for those who speak.

Shapes: F front rows, R some of them, D width, V vocabulary.
"""

import ctypes
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.native.blocks import Pointers
from nvium_core.engine.native.library import PRECISIONS, native_library
from nvium_core.model.exits import Adapter, Exit
from nvium_core.model.nvium import NviumForCausalLM


class ExitShape(ctypes.Structure):
    """As in exits.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "router_width", "adapter_width", "vocab_size")),
        *((name, ctypes.c_double) for name in ("eps", "temperature")),
    )


class NativeExits:
    """The exits of a model. Only for a model that `blocks.is_plain`."""

    def __init__(self, model: NviumForCausalLM) -> None:
        library = native_library()
        assert library is not None
        config, head = model.config, model.lm_head.weight
        precision = PRECISIONS[head.dtype]
        self._route, self._logits = (getattr(library, f"{name}_{precision}") for name in ("route", "logits"))
        self._precise = torch.promote_types(head.dtype, torch.float32)
        self._weights = [Pointers(exit_weights(cast(Exit, exit_), head)) for exit_ in model.exits]
        self._shape = ExitShape(
            config.hidden_size,
            config.router_hidden_size,
            config.adapter_hidden_size,
            config.vocab_size,
            config.rms_norm_eps,
            config.router_temperature,
        )

    def route(self, block: int, h_FD: Tensor) -> tuple[Tensor, Tensor]:
        """Normed rows [F, D] and log w [F, 2], float32 or better."""
        h_FD = h_FD.contiguous()
        x_FD = torch.empty_like(h_FD, dtype=self._precise)
        log_w_F2 = x_FD.new_empty(len(h_FD), 2)
        self._route(*self._of(block), *map(Tensor.data_ptr, (h_FD, x_FD, log_w_F2)), len(h_FD), torch.get_num_threads())
        return x_FD, log_w_F2

    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        """Of normed rows, [R, V], float32 or better."""
        x_RD = x_RD.contiguous()
        logits_RV = x_RD.new_empty(len(x_RD), self._shape.vocab_size)
        self._logits(*self._of(block), *map(Tensor.data_ptr, (x_RD, logits_RV)), len(x_RD), torch.get_num_threads())
        return logits_RV

    def _of(self, block: int) -> tuple[object, object]:
        return ctypes.byref(self._shape), self._weights[block].array


def exit_weights(exit_: Exit, head: Tensor) -> list[Tensor | None]:
    """In exits.cpp's order; None for what this exit has not."""
    router, adapter = exit_.router, exit_.adapter
    routing: list[Tensor | None] = [None] * 7
    if router is not None:
        layers = (router.fc1, router.fc2)
        routing = [part for layer in layers for part in (layer.weight, layer.bias)]
        routing += [router.norm.weight, router.head.weight, router.head.bias]
    adapting: list[Tensor | None] = [None] * 2
    if isinstance(adapter, Adapter):
        adapting = [adapter.up.weight, adapter.down.weight]
    weights = [exit_.norm.weight, *routing, *adapting, head]
    return [None if weight is None else weight.detach().contiguous() for weight in weights]
