"""Reads the header of a GGUF file: its metadata fields, and where its tensors are.

gguf's own reader takes ten times as long, because it makes NumPy arrays for every token of the vocabulary. It also
accepts tensors that overlap.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import calcsize, unpack_from
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

MAGIC = b"GGUF"
OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # of the containers ggml, ggmf, ggjt and ggla
VERSIONS = (2, 3)
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Code of a field's type → its format in `struct`."""

STRING, ARRAY = 8, 9
MAX_ITEMS = 2**24  # of an array: far above any vocabulary
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of tensors, unless the file has its own

REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
REMOVED |= {36: "IQ4_NL_4_4 or I2_S", 37: "IQ4_NL_4_8 or I8_S", 38: "IQ4_NL_8_8 or TL1"}
"""Codes of types that llama.cpp has removed → their names there and in BitNet's fork."""


class UnsupportedError(ValueError):
    """The file is of a kind that cannot be read. It may be intact."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file. `content` are its mapped bytes, copied when they are changed. `shape` has rows first."""

    name: str
    kind: GGMLQuantizationType
    shape: list[int]
    content: Tensor


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """Map a file. Return its fields, and its tensors by name. Raise `ValueError` or `OSError` for a damaged file.

    As in llama.cpp, every tensor must begin where the one before it ends, rounded up to the alignment.
    """
    reader = _Reader(path)
    if (magic := reader.read(len(MAGIC))) in OLD_MAGICS:
        raise UnsupportedError("is a GGML file, from before GGUF; convert the model again")
    if magic != MAGIC:
        raise ValueError("not a GGUF file")
    version, num_tensors, num_fields = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in VERSIONS:
        kind = f"GGUF version {version}" if version % 2**16 else "big-endian GGUF"
        raise UnsupportedError(f"{kind} is not supported; supported: little-endian versions 2 and 3")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.string()
        if name in fields:
            raise ValueError(f"two fields are named {name}")
        fields[name] = reader.value(reader.number("I"))
    alignment = fields.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two from 8, got {alignment!r}")
    return fields, {tensor.name: tensor for tensor in reader.tensors(num_tensors, alignment)}


class _Reader:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0

    def read(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        self._check(self._at)
        return self._file[begin : self._at]

    def number(self, form: str) -> Any:
        [number] = unpack_from(f"<{form}", self.read(calcsize(f"<{form}")))
        return number

    def string(self) -> str:
        return self.read(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(_form(kind))
        kind, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            raise ValueError(f"an array has {count:,} items; at most {MAX_ITEMS:,} are supported")
        if kind == STRING:
            return self._strings(count)
        form = np.dtype(_form(kind)).newbyteorder("<")
        return np.frombuffer(self.read(count * form.itemsize), form).tolist()

    def _strings(self, count: int) -> list[str]:
        file, size, begin, strings = self._file, len(self._file), self._at, []
        for _ in range(count):
            end = begin + 8 + int.from_bytes(file[begin : begin + 8], "little")
            if end > size:
                self._check(end)
            strings.append(file[begin + 8 : end].decode())
            begin = end
        self._at = begin
        return strings

    def tensors(self, count: int, alignment: int) -> Iterator[FileTensor]:
        """Read the list of tensors, which ends the header."""
        listed = {}
        end = 0
        for _ in range(count):
            name, shape = self.string(), [self.number("Q") for _ in range(self._num_dimensions())][::-1]
            code, begin = self.number("I"), self.number("Q")
            if name in listed:
                raise ValueError(f"two tensors are named {name}")
            if begin != end:
                raise ValueError(f"tensor {name} begins at byte {begin:,} of the data, expected {end:,}")
            kind, num_bytes = _size(name, code, shape)
            listed[name] = kind, shape, begin, num_bytes
            end = _rounded(begin + num_bytes, alignment)
        data = _rounded(self._at, alignment)
        for name, (kind, shape, begin, num_bytes) in listed.items():
            self._check(data + begin + num_bytes)
            content = torch.frombuffer(self._file, dtype=torch.uint8, count=num_bytes, offset=data + begin)
            yield FileTensor(name, kind, shape, content)

    def _num_dimensions(self) -> int:
        count: int = self.number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions; supported: 1 to {MAX_DIMENSIONS}")
        return count

    def _check(self, end: int) -> None:
        if end > len(self._file):
            raise ValueError("unexpected end of file")


def _form(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a field has the unknown type {kind}")
    return NUMBERS[kind]


def _size(name: str, code: int, shape: list[int]) -> tuple[GGMLQuantizationType, int]:
    if code not in GGMLQuantizationType.__members__.values():
        type_ = f"removed type {REMOVED[code]}" if code in REMOVED else f"unknown type {code}"
        raise UnsupportedError(f"tensor {name} has the {type_}, which is not supported")
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"tensor {name} has shape {shape}; {kind.name} needs rows of a positive multiple of {block}")
    return kind, prod(shape) // block * block_bytes


def _rounded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
