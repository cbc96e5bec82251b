"""Packs a model's weights in the order in which the native functions read them; matrix.h describes the format, which
follows from the type.

A matrix is packed straight from its stored form, a few rows at a time, in C++ (pack.h).

Shapes: N rows, D their length.
"""

import ctypes
import logging
import mmap
import time
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as StoredKind
from torch import Tensor, cat, nn, zeros_like

from nvium_core.choices import Instructions
from nvium_core.engine.device.native.library import PRECISIONS, make_struct, native_library, struct
from nvium_core.engine.device.paged_cache import CACHE_LINE, zeros
from nvium_core.engine.device.processor import instructions
from nvium_core.errors import CheckpointError
from nvium_core.model.exits import Adapter, Exit, Gate
from nvium_core.model.llama import Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import FLOATS, StoredMatrix, dequantize

logger = logging.getLogger(__name__)

DTYPES = {kind: dtype for dtype, kind in FLOATS.items()}

REPORT_SECONDS = 5

PIECE_BYTES = 32 << 20
ROWS_AT_ONCE = 1024
"""Rows that are packed together: whole panels of every build."""


class Packed(NamedTuple):
    """`Matrix` of matrix.h: its type and bytes."""

    kind: int
    data: Tensor


Weight = Tensor | Packed | None


class Packer:
    """Packs matrices, of `total_bytes` once packed, with the functions of one build."""

    def __init__(self, library: ctypes.CDLL, num_threads: int, total_bytes: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._free = zeros(0)  # memory of packed matrices, in large pieces
        self._files = mapped_files()
        self._total_bytes, self._num_bytes = total_bytes, 0
        self._reported = time.monotonic()

    def pack(self, weight_ND: Tensor) -> Packed:
        """Pack a matrix. Raise `CheckpointError` if a matrix of a file has NaN or infinite values."""
        kind = packed_kind(weight_ND)
        packed = self.zeros(self._library.packed_bytes(kind, *weight_ND.shape))
        self._pack_parts(weight_ND, kind, packed.data_ptr())
        self._num_bytes += packed.nbytes
        if time.monotonic() > self._reported + REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.info("packed %.2f of %.2f GB of weights", self._num_bytes / 1e9, self._total_bytes / 1e9)
        return Packed(kind, packed)

    def zeros(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if len(self._free) < size:
            self._free = zeros(max(size, PIECE_BYTES))
        own, self._free = self._free[:num_bytes], self._free[size:]
        return own

    def embedding(self, weight_ND: Tensor, *, is_packed: bool) -> tuple[int, Tensor]:
        """Return an embedding's type, and its rows as stored. Its numbers are checked, unless it is packed too."""
        matrix = as_stored(weight_ND)
        if not is_packed:
            scratch = bytearray(self._library.packed_bytes(matrix.kind, ROWS_AT_ONCE, matrix.shape[1]))
            out = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
            self._pack_parts(weight_ND, matrix.kind, out, is_kept=False)
        return matrix.kind, self._held(matrix).contiguous()

    def _held(self, matrix: StoredMatrix) -> Tensor:
        """Return `matrix.held()`. Floats are quantized in C++."""
        if (floats := matrix.floats_to_quantize()) is None:
            return matrix.held()
        block, block_bytes = GGML_QUANT_SIZES[matrix.kind]
        blocks = torch.empty(len(floats), floats.shape[1] // block * block_bytes, dtype=torch.uint8)
        rows = stored_rows(FLOATS[floats.dtype], floats, floats)
        self._library.quantize(ctypes.byref(rows), self._num_threads, matrix.kind, blocks.data_ptr())
        return blocks

    def _pack_parts(self, weight_ND: Tensor, kind: StoredKind, out: int, *, is_kept: bool = True) -> None:
        """Pack all rows as this type at the address `out`, a part at a time; unless they are kept, all at one place."""
        matrix, is_finite = as_stored(weight_ND), True
        for first in range(0, len(matrix), ROWS_AT_ONCE):
            part = matrix.at(slice(first, first + ROWS_AT_ONCE))
            held = (self._held(part) if part.kind == kind else part.numbers().to(DTYPES[kind])).contiguous()
            rows = stored_rows(kind, held, matrix, first) if is_kept else stored_rows(kind, held, part)
            is_finite &= bool(self._library.pack(ctypes.byref(rows), self._num_threads, out))
            if matrix is weight_ND:
                release(part, self._files)
        if matrix.place and not is_finite:
            raise CheckpointError(f"{matrix.place} has NaN or infinite values")


def stored_rows(kind: StoredKind, held: Tensor, matrix: Tensor, first: int = 0) -> Any:
    """Return a `StoredRows` of pack.h: rows of the matrix from `first` on, as this type. `held` must stay alive."""
    shape = {"num_rows": len(held), "length": matrix.shape[1], "num_all": len(matrix)}
    return make_struct("StoredRows", stored=kind, data=held.data_ptr(), first=first, **shape)


def as_stored(weight_ND: Tensor) -> StoredMatrix:
    return weight_ND if isinstance(weight_ND, StoredMatrix) else StoredMatrix(weight_ND.detach())


def packed_kind(weight_ND: Tensor) -> StoredKind:
    """Return the type of the packed matrix: the stored one, or bfloat16 if this is exact for wider floats."""
    matrix = as_stored(weight_ND)
    if matrix.dtype != torch.float32:
        return FLOATS[matrix.dtype]
    if matrix.kind not in (StoredKind.F32, StoredKind.F64):
        return matrix.kind
    return StoredKind.BF16 if fits_bfloat16(matrix) else StoredKind.F32


def fits_bfloat16(weight_ND: Tensor) -> bool:
    parts = (dequantize(weight_ND[first : first + ROWS_AT_ONCE]) for first in range(0, len(weight_ND), ROWS_AT_ONCE))
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in parts)


def mapped_files() -> list[range]:
    """Return the addresses of all files that are mapped into this process. Empty if the system does not list them."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines())
    return [range(*(int(end, 16) for end in fields[0].split("-"))) for fields in lines if fields[4] != "0"]


def release(matrix: StoredMatrix, files: Items[range]) -> None:
    """Let the system reclaim the matrix's pages, if they are a file's. A later read maps them again."""
    content = matrix.content
    while isinstance(content, StoredMatrix):
        content = content.content
    first = -(-content.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (content.data_ptr() + content.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and any(file.start <= first and first + size <= file.stop for file in files):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class Structs:
    """A C array of `Layer` or `Exit` of call.h. Keeps the weights alive."""

    def __init__(self, name: str, weights: Items[Mapping[str, Weight]]) -> None:
        self.weights = weights
        made = [make_struct(name, **{field: value_of(weight) for field, weight in each.items()}) for each in weights]
        self.array = (struct(name) * len(made))(*made)


def value_of(weight: Weight) -> Any:
    if isinstance(weight, Packed):
        return make_struct("Matrix", kind=weight.kind, data=weight.data.data_ptr())
    return weight.data_ptr() if isinstance(weight, Tensor) else weight


def supports(model: Nvium, choice: Instructions = "auto") -> bool:
    """Whether the native functions can run this model here with these instructions."""
    if model.device.type != "cpu":
        return False
    if not {id(weight) for weight in model.parameters()} <= {id(weight) for weight in _read(model)}:
        return False
    # Skip the biases of router heads, which are always in float32 or better.
    precisions = {weight.dtype for name, weight in model.named_parameters() if not name.endswith("router.head.bias")}
    is_supported = len(precisions) == 1 and precisions <= PRECISIONS.keys()
    return is_supported and native_library(instructions(choice)) is not None


def _read(model: Nvium) -> Iterator[Tensor]:
    """Yield every parameter that the native functions read."""
    yield from (model.model.embed_tokens.weight, model.lm_head.weight)
    yield from () if model.model.norm is None else (model.model.norm.weight,)
    layers = (layer_parts(cast(Layer, layer)) for layer in model.model.layers)
    exits = (exit_parts(cast(Exit, exit_)) for exit_ in model.exits)
    yield from (
        weight for exit_ in model.exits if isinstance(exit_.router, Gate) for weight in exit_.router.parameters()
    )
    yield from (part for parts in (*layers, *exits) for part in parts.values() if isinstance(part, Tensor))


def layer_parts(layer: Layer) -> dict[str, Weight]:
    """Return the fields of `Layer` in call.h."""
    attention = layer.self_attn
    return {
        "attention_norm": getattr(layer.input_layernorm, "weight", None),
        **{name: getattr(attention, f"{name}_proj").weight for name in "qkvo"},
        **{f"{name}_bias": getattr(attention, f"{name}_proj").bias for name in "qkv"},
        **{f"{name}_norm": getattr(getattr(attention, f"{name}_norm"), "weight", None) for name in "qk"},
        "attention_post_norm": getattr(layer.post_self_attn_layernorm, "weight", None),
        "mlp_norm": getattr(layer.post_attention_layernorm, "weight", None),
        "mlp_post_norm": getattr(layer.post_mlp_layernorm, "weight", None),
        **{name: getattr(getattr(layer.mlp, f"{name}_proj"), "weight", None) for name in ("gate", "up", "down")},
    }


def exit_parts(exit_: Exit) -> dict[str, Weight]:
    """Return the fields of `Exit` in call.h, without the head. Weights that the exit lacks are None."""
    names = "fc1", "fc1_bias", "fc2", "fc2_bias", "router_norm", "router_head", "router_bias", "up", "down"
    parts: dict[str, Weight] = {"norm": getattr(exit_.norm, "weight", None), **dict.fromkeys(names)}
    router = exit_.router
    if isinstance(router, Gate):  # softmax over (0, x) is sigmoid(x)
        weight, bias = dequantize(router.head.weight), router.head.bias
        parts |= {"router_head": cat([zeros_like(weight), weight]), "router_bias": cat([zeros_like(bias), bias])}
    elif router is not None:
        parts |= {"fc1": router.fc1.weight, "fc1_bias": router.fc1.bias, "fc2": router.fc2.weight}
        parts |= {"fc2_bias": router.fc2.bias, "router_norm": router.norm.weight}
        parts |= {"router_head": router.head.weight, "router_bias": router.head.bias}
    if isinstance(adapter := exit_.adapter, Adapter):
        parts |= {"up": adapter.up.weight, "down": adapter.down.weight}
    return parts


def is_identity(adapter: nn.Module) -> bool:
    """Whether the adapter adds zero, as at the last exit of a retrofitted model."""
    if not isinstance(adapter, Adapter):
        return False
    return not dequantize(adapter.down.weight).any() and bool(dequantize(adapter.up.weight).isfinite().all())


def packed_bytes(model: Nvium, library: ctypes.CDLL) -> int:
    """Estimate the bytes of `pack_weights`. Whether a float32 matrix fits bfloat16 is judged by its first row."""
    parts = (model.model.layers, model.exits, model.lm_head)  # without the embedding, which is not packed
    matrices = {weight for part in parts for weight in part.parameters() if weight.dim() == 2}
    return sum(library.packed_bytes(packed_kind(weight[:1]), *weight.shape) for weight in matrices)


def pack_weights(model: Nvium, packer: Packer) -> tuple[Structs, Structs]:
    """Pack the weights of all layers and all exits. The exits share one head.

    Biases and norms are float32 or better. A matrix stays quantized, or gets the narrowest precision that is exact.
    """
    precise = torch.promote_types(model.dtype, torch.float32)

    def pack(weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        return weight.detach().to(precise).contiguous() if weight.dim() == 1 else packer.pack(weight)

    def pack_all(parts: dict[str, Weight]) -> dict[str, Weight]:
        return {name: pack(part) for name, part in parts.items()}

    layers = [pack_all(layer_parts(cast(Layer, layer))) for layer in model.model.layers]
    head, exits = pack(model.lm_head.weight), list[dict[str, Weight]]()
    for exit_ in model.exits:
        parts = exit_parts(cast(Exit, exit_))
        if is_identity(cast(Exit, exit_).adapter):
            parts |= {"up": None, "down": None}
        exits.append({**pack_all(parts), "head": head})
    return Structs("Layer", layers), Structs("Exit", exits)


def address(numbers: "array[int] | array[float]") -> int:
    """Return the address of the first number. It is valid while the array lives and keeps its size."""
    return numbers.buffer_info()[0]
