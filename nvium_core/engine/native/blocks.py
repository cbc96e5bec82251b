"""A Step's rows through its block, in one native call.

Shapes: R rows, D width, L layers, S cache slots, P head size.
"""

import ctypes
from array import array
from collections.abc import Sequence as Items
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.attention import PagedAttention
from nvium_core.engine.native.library import PRECISIONS, native_library
from nvium_core.engine.scheduler import SHORT_RUN, Step
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import NviumForCausalLM

WIDEST = 64
"""Rows of a Step that are carried so, if no run is long; for more, PyTorch's matrix products are faster."""


class Shape(ctypes.Structure):
    """As in block.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("boundary", "num_layers", "first_layer", "width", "inner", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_key_heads", "head_size", "page_size", "num_slots")),
        ("eps", ctypes.c_double),
    )


class Rows(ctypes.Structure):
    """As in block.cpp."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("places", "pages", "tokens")),
    )


class NativeBlocks:
    """The blocks of a model over the tensors of a cache. Only for a model that `is_plain`."""

    def __init__(self, model: NviumForCausalLM, attention: PagedAttention, states_2SD: Tensor) -> None:
        library = native_library()
        assert library is not None
        config, like = model.config, model.lm_head.weight
        self._run = getattr(library, f"run_block_{PRECISIONS[like.dtype]}")
        precise = torch.promote_types(like.dtype, torch.float32)
        positions = torch.arange(config.max_position_embeddings)
        cos_TP, sin_TP = (x.contiguous() for x in model.model.rotary(positions, precise))
        embedding = model.model.embed_tokens.weight.detach().contiguous()
        self._tensors = Pointers([attention.keys, attention.values, cos_TP, sin_TP, states_2SD, embedding])
        self._layers = [Pointers(block_weights(model, block)) for block in config.blocks]
        self._shapes = [
            Shape(
                boundary,
                len(block),
                block.start,
                config.hidden_size,
                config.intermediate_size,
                config.num_attention_heads,
                attention.keys.shape[2],
                attention.keys.shape[3],
                attention.page_size,
                attention.keys.shape[1],
                config.rms_norm_eps,
            )
            for boundary, block in enumerate(config.blocks)
        ]

    def carry(self, step: Step) -> None:
        """Take the rows from the boundary before the block to the one behind it."""
        places, pages, tokens = array("q"), array("q"), array("q")
        for run in step.runs:
            for position in run.rows:
                places.extend((position, len(pages)))
            pages.extend(run.sequence.pages)
            if step.block == 0:
                tokens.extend(run.sequence.token_ids[run.rows.start : run.rows.stop])
        rows = Rows(len(places) // 2, address(places), address(pages), address(tokens) if tokens else None)
        shape, layers = self._shapes[step.block], self._layers[step.block]
        self._run(ctypes.byref(shape), layers.array, self._tensors.array, ctypes.byref(rows), torch.get_num_threads())


def suits(step: Step) -> bool:
    """Whether the native call is likely to be the faster one."""
    return step.num_rows <= WIDEST and all(len(run.rows) <= SHORT_RUN for run in step.runs)


class Pointers:
    """Where tensors are, null for None, for as long as they are needed there."""

    def __init__(self, tensors: Items[Tensor | None]) -> None:
        self._kept = tensors
        self.array = (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


def is_plain(model: NviumForCausalLM) -> bool:
    """Whether the native functions know all the model's parts, and run where it is."""
    config = model.config
    has_more = config.attention_bias or config.mlp_bias or config.hidden_act != "silu"
    named = model.named_parameters()
    precisions = {weight.dtype for name, weight in named if not name.endswith("router.head.bias")}
    is_of_one_precision = len(precisions) == 1 and precisions < set(PRECISIONS)
    return model.device.type == "cpu" and is_of_one_precision and not has_more


def block_weights(model: NviumForCausalLM, block: range) -> list[Tensor]:
    """In block.cpp's order."""
    return [
        weight.detach().contiguous()
        for index in block
        for layer in [cast(Layer, model.model.layers[index])]
        for weight in (
            layer.input_layernorm.weight,
            *(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo"),
            layer.post_attention_layernorm.weight,
            *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
        )
    ]


def address(numbers: "array[int] | array[float]") -> int:
    """Of the first; the array must be kept as long as that is read, and not grow."""
    return numbers.buffer_info()[0]
