"""The groups of a GGUF file's Q8_0, Q4_0 and Q4_1 matrices, as the engine has them: nothing is rounded on the way.

A block of Q8_0 is a float16 scale and 32 int8 numbers. A block of Q4_0 is a scale and 16 bytes: the low halves hold
numbers 0 to 15, the high halves numbers 16 to 31, each plus 8. Q4_1 has a scale, a minimum and numbers without an
offset.

Shapes: N rows, D their length, G groups, X bytes of a block.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nvium_core.model.gguf import EXACT, GGUFFile, our_name, rows_in_our_order
from nvium_core.model.quantized import GROUP, LEAST, GroupKind, Groups, hold

logger = logging.getLogger(__name__)

KEPT: dict[str, GroupKind] = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_1"}
HALF_BYTES = 2
EMBEDDING, HEAD = "token_embd.weight", "lm_head.weight"


def has_groups(file: GGUFFile) -> bool:
    """Whether the backbone or the head has groups that the engine supports."""
    return any(tensor.tensor_type.name in KEPT and name != EMBEDDING for name, tensor in file.tensors.items())


@torch.no_grad()
def hold_groups(model: nn.Module, file: GGUFFile) -> None:
    """Attach the file's groups to a model read in float32. Weights in groups that the engine does not support are
    rounded to bfloat16, and the largest rounding is logged."""
    held = dict(_layers_with_groups(model, file))
    for layer, groups in held.items():
        hold(layer, groups)
    others = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer not in held)
    kinds = {our_place(file, name): tensor.tensor_type.name for name, tensor in file.tensors.items()}
    names = {layer: f"{name}.weight" for name, layer in model.named_modules()}
    rounded = [layer.weight for layer in others if kinds.get(names[layer], "BF16") not in EXACT]  # exits are not there
    largest = max(map(_round, rounded), default=0.0)
    logger.info(
        "%s: %d matrices keep their groups, %d are in bfloat16; the largest rounding is %.2g",
        *(file.path.name, len(held), len(rounded), largest),
    )


def _round(weight: Tensor) -> float:
    """Round to bfloat16; return the largest change."""
    narrow = weight.bfloat16().to(weight.dtype)
    largest = (narrow - weight).abs().max().item()
    weight.copy_(narrow)
    return largest


def _layers_with_groups(model: nn.Module, file: GGUFFile) -> Iterator[tuple[nn.Linear, Groups]]:
    for name, groups in read_groups(file):
        layer = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(layer, nn.Linear):
            yield layer, groups


def our_place(file: GGUFFile, name: str) -> str:
    """Our name of a matrix; the head's for a tied embedding."""
    return HEAD if name == EMBEDDING and "output.weight" not in file.tensors else our_name(name)


def read_groups(file: GGUFFile) -> Iterator[tuple[str, Groups]]:
    """Groups of every matrix of a kind in `KEPT`, by our name, with the rows of queries and keys in our order."""
    for name, stored in file.tensors.items():
        if kind := KEPT.get(stored.tensor_type.name):
            blocks_NGX = torch.from_numpy(np.array(stored.data)).view(torch.uint8)
            num_rows = int(stored.shape[1])
            blocks_NGX = blocks_NGX.view(num_rows, int(stored.shape[0]) // GROUP, -1)
            blocks_NGX = rows_in_our_order(file, name, blocks_NGX).contiguous()
            yield our_place(file, name), _groups(kind, blocks_NGX)


def _groups(kind: GroupKind, blocks_NGX: Tensor) -> Groups:
    num_halves = 2 if kind == "q4_1" else 1
    halves_NGX = blocks_NGX[..., : num_halves * HALF_BYTES].contiguous().view(torch.float16)
    bytes_NGX = blocks_NGX[..., num_halves * HALF_BYTES :].contiguous()
    if kind == "q8":
        numbers_NGX = bytes_NGX.view(torch.int8)
    else:
        numbers_NGX = torch.cat([bytes_NGX & 15, bytes_NGX >> 4], -1).to(torch.int8) + LEAST[kind]
    scales_NG, *minima = (half_NG.contiguous() for half_NG in halves_NGX.unbind(-1))
    return Groups(kind, numbers_NGX.flatten(1), scales_NG, *minima)
