"""Packs matrices for the native functions; matrix.h describes the format, which follows from the type.

A matrix is packed straight from its stored form, a few rows at a time, in C++ (pack.h).

Shapes: N rows, D their length.
"""

import ctypes
import logging
import mmap
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as StoredKind
from torch import Tensor

from nvium_core.engine.device.arena import Arena
from nvium_core.engine.device.native.structs import make_struct
from nvium_core.errors import CheckpointError
from nvium_core.model.stored import FLOATS, StoredMatrix, dequantize

logger = logging.getLogger(__name__)

DTYPES = {kind: dtype for dtype, kind in FLOATS.items()}

REPORT_SECONDS = 5

ROWS_AT_ONCE = 1024
"""Rows that are packed together: whole panels of every build."""


class Packed(NamedTuple):
    """`Matrix` of matrix.h: its type and bytes."""

    kind: int
    data: Tensor


class Packer:
    """Packs matrices, of `total_bytes` once packed, with the functions of one build."""

    def __init__(self, library: ctypes.CDLL, num_threads: int, total_bytes: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._arena = Arena()
        self._files = mapped_files()
        self._total_bytes, self._num_bytes = total_bytes, 0
        self._reported = time.monotonic()

    def pack(self, weight_ND: Tensor) -> Packed:
        """Pack a matrix. Raise `CheckpointError` if a matrix of a file has NaN or infinite values."""
        kind = packed_kind(weight_ND)
        packed = self._arena.zeros(num_bytes(self._library, kind, *weight_ND.shape))

        def pack(rows: Any) -> int:
            return cast(int, self._library.pack(ctypes.byref(rows), self._num_threads, packed.data_ptr()))

        self._each_part(weight_ND, kind, pack)
        self._report(packed.nbytes)
        return Packed(kind, packed)

    def _report(self, added_bytes: int) -> None:
        self._num_bytes += added_bytes
        if time.monotonic() > self._reported + REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.info("packed %.2f of %.2f GB of weights", self._num_bytes / 1e9, self._total_bytes / 1e9)

    def embedding(self, weight_ND: Tensor, *, is_packed: bool) -> tuple[int, Tensor]:
        """Return an embedding's type, and its rows as stored. Its numbers are checked, unless it is packed too."""
        matrix = as_stored(weight_ND)
        scratch = bytearray(num_bytes(self._library, matrix.kind, ROWS_AT_ONCE, matrix.shape[1]))
        scratch_at = ctypes.addressof(ctypes.c_char.from_buffer(scratch))

        def are_finite(rows: Any) -> int:
            rows.first, rows.num_all = 0, rows.num_rows
            return cast(int, self._library.pack(ctypes.byref(rows), self._num_threads, scratch_at))

        if not is_packed:
            self._each_part(weight_ND, matrix.kind, are_finite)
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

    def _each_part(self, weight_ND: Tensor, kind: StoredKind, use: Callable[[Any], int]) -> None:
        """Call `use` for all rows as this type, a part at a time. It returns whether their numbers are finite."""
        matrix, is_finite = as_stored(weight_ND), True
        for first in range(0, len(matrix), ROWS_AT_ONCE):
            part = matrix.at(slice(first, first + ROWS_AT_ONCE))
            held = (self._held(part) if part.kind == kind else part.numbers().to(DTYPES[kind])).contiguous()
            is_finite &= bool(use(stored_rows(kind, held, matrix, first)))
            if matrix is weight_ND:
                release(part, self._files)
        if matrix.place and not is_finite:
            raise CheckpointError(f"{matrix.place} has NaN or infinite values")


def stored_rows(kind: StoredKind, held: Tensor, matrix: Tensor, first: int = 0) -> Any:
    """Return a `StoredRows` of pack.h: rows of the matrix from `first` on, as this type. `held` must stay alive."""
    shape = {"num_rows": len(held), "length": matrix.shape[1], "num_all": len(matrix)}
    return make_struct("StoredRows", stored=kind, data=held.data_ptr(), first=first, **shape)


def num_bytes(library: ctypes.CDLL, kind: StoredKind, num_rows: int, length: int) -> int:
    return cast(int, library.packed_bytes(kind, num_rows, length))


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
