"""The groups of a GGUF file's Q8_0 and Q4_0 matrices, as the engine has them: nothing is rounded on the way.

A block of Q8_0 is a float16 scale and 32 int8 numbers; of Q4_0 a scale and 16 bytes, whose low halves are numbers 0 to
15 and whose high halves are 16 to 31, 8 more than they stand for.

Shapes: N rows, D their length, G groups, X bytes of a block.
"""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nvium_core.choices import Quantization
from nvium_core.model.gguf import EXACT, GGUFFile, our_name, rows_in_our_order
from nvium_core.model.quantized import GROUP, Groups, hold

logger = logging.getLogger(__name__)

KEPT: dict[str, Quantization] = {"Q8_0": "q8", "Q4_0": "q4"}
SCALE_BYTES = 2
EMBEDDING, HEAD = "token_embd.weight", "lm_head.weight"


def has_groups(file: GGUFFile) -> bool:
    """Whether matrices of the backbone or the head are in groups that the engine has."""
    return any(tensor.tensor_type.name in KEPT and name != EMBEDDING for name, tensor in file.tensors.items())


@torch.no_grad()
def hold_groups(model: nn.Module, file: GGUFFile) -> None:
    """Give a model that was read from the file in float32 its groups. The weights of other layers whose groups the
    engine has not become numbers of bfloat16, and the largest rounding is logged."""
    held = dict(_layers_with_groups(model, file))
    for layer, groups in held.items():
        hold(layer, groups)
    others = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer not in held)
    kinds = {our_place(file, name): tensor.tensor_type.name for name, tensor in file.tensors.items()}
    names = {layer: f"{name}.weight" for name, layer in model.named_modules()}
    rounded = [layer.weight for layer in others if kinds[names[layer]] not in EXACT]
    largest = max(map(_round, rounded), default=0.0)
    logger.info(
        "%s: %d matrices keep their groups, %d are in bfloat16; the largest rounding is %.2g",
        *(file.path.name, len(held), len(rounded), largest),
    )


def _round(weight: Tensor) -> float:
    """To bfloat16; by how much at most."""
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
    """Our name; of an embedding that is the head too, the head's."""
    return HEAD if name == EMBEDDING and "output.weight" not in file.tensors else our_name(name)


def read_groups(file: GGUFFile) -> Iterator[tuple[str, Groups]]:
    """Of every matrix in a kind of `KEPT`, by our place; rows of queries and keys as ours are."""
    for name, stored in file.tensors.items():
        if kind := KEPT.get(stored.tensor_type.name):
            blocks_NGX = torch.from_numpy(np.array(stored.data)).view(torch.uint8)
            num_rows = int(stored.shape[1])
            blocks_NGX = blocks_NGX.view(num_rows, int(stored.shape[0]) // GROUP, -1)
            blocks_NGX = rows_in_our_order(file, name, blocks_NGX).contiguous()
            scales_NG = blocks_NGX[..., :SCALE_BYTES].contiguous().view(torch.float16)[..., 0]
            yield (
                our_place(file, name),
                Groups(kind, NUMBERS[kind](blocks_NGX[..., SCALE_BYTES:]).flatten(1), scales_NG),
            )


def _halves(bytes_NGX: Tensor) -> Tensor:
    return torch.cat([bytes_NGX & 15, bytes_NGX >> 4], -1).to(torch.int8) - 8


NUMBERS: dict[Quantization, Callable[[Tensor], Tensor]] = {
    "q8": lambda bytes_NGX: bytes_NGX.contiguous().view(torch.int8),
    "q4": _halves,
}
