"""Reads Q8_0, Q4_0 and Q4_1 matrices of a GGUF file as `Groups`, without rounding.

A group of Q8_0 is a float16 scale and 32 int8 numbers. A group of Q4_0 is a float16 scale and 16 bytes: their low
nibbles are numbers 0 to 15, their high nibbles numbers 16 to 31. Each nibble is the number plus 8. A group of Q4_1 is a
scale, a minimum, and 16 bytes whose nibbles are the numbers themselves.

Shapes: N rows, D row length, G groups, X bytes of a group.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nvium_core.model.gguf import EXACT, GGUFFile, our_name, rows_in_our_order
from nvium_core.model.quantized import GROUP, LEAST, GroupKind, Groups, set_groups

logger = logging.getLogger(__name__)

GROUP_KINDS: dict[str, GroupKind] = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_1"}
HALF_BYTES = 2
EMBEDDING, HEAD = "token_embd.weight", "lm_head.weight"


def has_groups(file: GGUFFile) -> bool:
    """Return whether any matrix except the embedding has a type in `GROUP_KINDS`."""
    return any(tensor.tensor_type.name in GROUP_KINDS and name != EMBEDDING for name, tensor in file.tensors.items())


@torch.no_grad()
def load_groups(model: nn.Module, file: GGUFFile) -> None:
    """Attach the file's groups to a float32 model. Round matrices of other quantized types to bfloat16."""
    held: set[nn.Module] = set()
    for name, groups in read_groups(file):
        layer = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(layer, nn.Linear):
            set_groups(layer, groups)
            held.add(layer)
    types = {_layer_weight(file, name): tensor.tensor_type.name for name, tensor in file.tensors.items()}
    rounded = [
        layer.weight
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer not in held
        if types.get(f"{name}.weight", "BF16") not in EXACT  # retrofitted exits are missing in the file
    ]
    largest = max(map(_round, rounded), default=0.0)
    logger.info(
        "%s: %d matrices stay quantized, %d become bfloat16; largest rounding error %.2g",
        *(file.path.name, len(held), len(rounded), largest),
    )


def _round(weight: Tensor) -> float:
    """Round the weight to bfloat16 in place. Return the largest change."""
    narrow = weight.bfloat16().to(weight.dtype)
    largest = (narrow - weight).abs().max().item()
    weight.copy_(narrow)
    return largest


def _layer_weight(file: GGUFFile, name: str) -> str:
    """Return our name of a matrix. A tied embedding is named as the head, because only the head is a linear layer."""
    return HEAD if name == EMBEDDING and "output.weight" not in file.tensors else our_name(name)


def read_groups(file: GGUFFile) -> Iterator[tuple[str, Groups]]:
    """Read every matrix with a type in `GROUP_KINDS`, under our name, with query and key rows in our order."""
    for name, stored in file.tensors.items():
        if kind := GROUP_KINDS.get(stored.tensor_type.name):
            packed_NGX = torch.from_numpy(np.array(stored.data)).view(torch.uint8)
            num_rows = int(stored.shape[1])
            packed_NGX = packed_NGX.view(num_rows, int(stored.shape[0]) // GROUP, -1)
            packed_NGX = rows_in_our_order(file, name, packed_NGX).contiguous()
            yield _layer_weight(file, name), _groups(kind, packed_NGX)


def _groups(kind: GroupKind, packed_NGX: Tensor) -> Groups:
    num_halves = 2 if kind == "q4_1" else 1
    halves_NGX = packed_NGX[..., : num_halves * HALF_BYTES].contiguous().view(torch.float16)
    bytes_NGX = packed_NGX[..., num_halves * HALF_BYTES :].contiguous()
    if kind == "q8":
        numbers_NGX = bytes_NGX.view(torch.int8)
    else:
        numbers_NGX = torch.cat([bytes_NGX & 15, bytes_NGX >> 4], -1).to(torch.int8) + LEAST[kind]
    scales_NG, *minima = (half_NG.contiguous() for half_NG in halves_NGX.unbind(-1))
    return Groups(kind, numbers_NGX.flatten(1), scales_NG, *minima)
