"""Arranges tensors of related models as ours are: fused matrices split, rotary pairs half a head apart, norms whole.

Matrices are `StoredMatrix`: their rows are chosen, and no number is copied.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nvium_core.model.backbones import RowOrder
from nvium_core.model.config import NviumConfig
from nvium_core.model.stored import StoredMatrix


def arranged(
    tensors: dict[str, Tensor], config: NviumConfig, rows: RowOrder, *, adds_one: bool = False
) -> dict[str, Tensor]:
    """Arrange tensors under our names.

    rows: order of the query and key rows.
    adds_one: norms store w for 1 + w. The sum is float64, because the stored precision would round it.
    """
    whole = dict(part for name, tensor in tensors.items() for part in split(name, tensor, config))
    for name, tensor in whole.items():
        if rows == "pairs" and module_of(name) in ("q_proj", "k_proj"):
            whole[name] = in_our_order(tensor, config)
        if adds_one and "norm" in name:
            whole[name] = tensor.double() + 1
    return whole


def module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def split(name: str, tensor: Tensor, config: NviumConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a fused matrix or bias, or the tensor itself."""
    head_dim, inner = config.head_dim or 0, config.intermediate_size
    keys = (config.num_key_value_heads or 0) * head_dim
    fused = {
        "qkv_proj": {"q_proj": config.num_attention_heads * head_dim, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    kind = module_of(name)
    parts = fused.get(kind, {})
    if tensor.shape[0] != sum(parts.values()):  # not fused, or of a wrong shape, which the caller will report
        yield name, tensor
        return
    first = 0
    for part, size in parts.items():
        yield name.replace(kind, part), tensor[first : first + size]
        first += size


def in_our_order(tensor: Tensor, config: NviumConfig) -> Tensor:
    """Reorder the rows of each head, or its biases. Only the rotated ones are in pairs."""
    size, rotated = config.head_dim or 0, config.rotary_size
    if len(tensor) % size:
        return tensor  # of a wrong shape, which the caller will report
    order = torch.cat([torch.arange(rotated).view(-1, 2).T.flatten(), torch.arange(rotated, size)])
    rows = (torch.arange(0, len(tensor), size)[:, None] + order).flatten()
    return tensor.at(rows) if isinstance(tensor, StoredMatrix) else tensor[rows]
