"""Reads quantized matrices of a GGUF file as `Groups`, without rounding.

Shapes: N rows, D row length, B blocks of a row, G groups, X bytes of a row or block.
"""

import logging
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nvium_core.model.gguf import EXACT, GGUFFile, our_name, rows_in_our_order
from nvium_core.model.quantized import GroupKind, Groups, set_groups

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

GROUP_KINDS: dict[str, GroupKind] = {
    "Q8_0": "q8",
    "Q5_0": "q8",
    "IQ4_NL": "q8",
    "Q4_0": "q4",
    "Q4_1": "q4_1",
    "Q4_K": "q4_k",
    "Q6_K": "q6_k",
}
"""Type of a GGUF matrix → its kind here. Numbers of 5 and 6 bits, and those of IQ4_NL's table, take 8 bits."""

ONE, ZERO = np.float16(1).tobytes(), np.float16(0).tobytes()
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
        if stored.tensor_type.name in GROUP_KINDS:
            rows_NX = rows_in_our_order(file, name, torch.from_numpy(np.array(stored.data)).view(torch.uint8))
            yield _layer_weight(file, name), _groups(stored.tensor_type, rows_NX.numpy())


def _groups(kind: gguf.GGMLQuantizationType, rows_NX: Bytes) -> Groups:
    """Split rows of blocks into scales, minima and numbers. Blocks with a scale of 1 dequantize to their numbers."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks_NBX = rows_NX.reshape(len(rows_NX), -1, block_bytes)
    ones_NBX = blocks_NBX.copy()
    minima_NBG: Any = None
    match kind.name:
        case "Q4_K":
            factors_NBG, minimum_factors_NBG = (
                part.reshape(*blocks_NBX.shape[:2], -1)
                for part in gguf.quants.Q4_K.get_scale_min(blocks_NBX[..., 4:16].reshape(-1, 12))
            )
            halves_NBX = _halves(blocks_NBX[..., :4]).astype(np.float32)
            scales_NBG, minima_NBG = halves_NBX[..., :1] * factors_NBG, -halves_NBX[..., 1:] * minimum_factors_NBG
            ones_NBX[..., :16] = [*ONE, *ZERO, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
        case "Q6_K":
            scales_NBG = _halves(blocks_NBX[..., 208:]).astype(np.float32) * blocks_NBX[..., 192:208].view(np.int8)
            ones_NBX[..., 192:] = [1] * 16 + [*ONE]
        case "Q4_1":
            scales_NBG, minima_NBG = np.split(_halves(blocks_NBX[..., :4]), 2, axis=-1)
            ones_NBX[..., :4] = [*ONE, *ZERO]
        case _:
            scales_NBG = _halves(blocks_NBX[..., :2])
            ones_NBX[..., :2] = [*ONE]
    numbers_ND = gguf.dequantize(ones_NBX.reshape(rows_NX.shape), kind).astype(np.int8)
    parts = [part.reshape(len(rows_NX), -1) for part in (scales_NBG, minima_NBG) if part is not None]
    scales_NG, *minima_NG = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    return Groups(GROUP_KINDS[kind.name], torch.from_numpy(numbers_ND), scales_NG, *minima_NG)


def _halves(bytes_NBX: Bytes) -> Any:
    return np.ascontiguousarray(bytes_NBX).view(np.float16)
