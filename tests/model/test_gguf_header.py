import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from nvium_core import CheckpointError
from nvium_core.model.checkpoint import read_safetensors
from nvium_core.model.gguf import open_gguf
from nvium_core.model.gguf_header import read_header
from nvium_core.model.source import read_source
from tests.limits import limited
from tests.model.gguf_files import close

FIELDS: dict[str, tuple[str, Any]] = {
    "text": ("string", "łódź"),
    "flag": ("bool", True),
    "small": ("int8", -3),
    "large": ("uint64", 2**63),
    "ratio": ("float32", 0.5),
    "precise": ("float64", 0.1),
    "words": ("array", ["a", "", "łódź"]),
    "numbers": ("array", [1, -2, 3]),
    "scores": ("array", [0.5, -1.5]),
}


def small_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, value) in FIELDS.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor("vector", np.arange(3, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(12, dtype=np.float16).reshape(3, 4))
    blocks = gguf.quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    close(writer)
    return path


def test_fields_and_tensors_are_those_of_the_library(tmp_path):
    path = small_file(tmp_path / "model.gguf")
    (fields, tensors), theirs = read_header(path), gguf.GGUFReader(path)
    assert {name: fields[name] for name in FIELDS} == {name: value for name, (_, value) in FIELDS.items()}
    for name, value in fields.items():
        assert value == theirs.get_field(name).contents()
    for ours, stored in zip(tensors.values(), theirs.tensors, strict=True):
        assert (ours.name, ours.kind, ours.shape) == (stored.name, stored.tensor_type, stored.shape[::-1].tolist())
        assert torch.equal(ours.content, torch.from_numpy(stored.data.view(np.uint8).flatten()))


def changed(path: Path, name: str, at: int, form: str, value: int) -> Path:
    """Change the description of a tensor, `at` bytes after its name."""
    content = bytearray(small_file(path).read_bytes())
    struct.pack_into(form, content, content.index(name.encode()) + len(name) + at, value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("begin", [0, 31, 33, 2**64 - 32])
def test_a_tensor_must_begin_where_the_one_before_it_ends(begin, tmp_path):
    path = changed(tmp_path / "model.gguf", "matrix", 4 + 2 * 8 + 4, "<Q", begin)
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*tensor matrix begins at byte .* expected 32"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("name", "at", "form", "value", "message"),
    [
        ("vector", 0, "<I", 0, "0 dimensions"),
        ("vector", 0, "<I", 2**31, "dimensions"),
        ("vector", 4, "<Q", 0, r"tensor vector has shape \[0\]"),
        ("vector", 4, "<Q", 2**62, "tensor matrix begins"),
        ("vector", 4 + 8, "<I", 99, "tensor vector has the unknown type 99"),
        ("vector", 4 + 8, "<I", 8, "tensor vector has shape"),
        ("blocks", 4, "<Q", 48, r"tensor blocks has shape \[2, 48\]; Q8_0 needs rows of a positive multiple of 32"),
        ("blocks", 4 + 8, "<Q", 3, "unexpected end of file"),
    ],
)
def test_a_wrong_size_or_type_is_rejected_by_the_tensors_name(name, at, form, value, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_gguf(changed(tmp_path / "model.gguf", name, at, form, value))


@pytest.mark.parametrize(("code", "name"), [(4, "Q4_2"), (31, "Q4_0_4_4"), (36, "I2_S"), (38, "TL1")])
def test_a_type_that_llama_cpp_has_removed_is_not_supported(code, name, tmp_path):
    with pytest.raises(CheckpointError, match=rf"gguf: tensor blocks has the removed type .*{name}, which is not sup"):
        open_gguf(changed(tmp_path / "model.gguf", "blocks", 4 + 2 * 8, "<I", code))


ARRAY, STRING, UINT8, MANY = 9, 8, 0, 2**40


def field(kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + content


def header(*, num_tensors: int = 0, num_fields: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUX",
        header() + field(ARRAY, struct.pack("<IQ", UINT8, MANY)),
        header() + field(ARRAY, struct.pack("<IQ", STRING, 2**23) + struct.pack("<Q", 0) * 3),
        header() + field(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(20)),
        header() + field(STRING, struct.pack("<Q", MANY)),
        header() + field(STRING, struct.pack("<Q", 1) + b"\xff"),
        header() + field(13, bytes(8)),
        header(num_fields=2) + field(UINT8, b"x") * 2,
        header(num_fields=MANY) + field(UINT8, b"x"),
        header(num_tensors=MANY, num_fields=0),
    ],
)
def test_a_damaged_header_is_rejected_at_once(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: damaged or incomplete"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "GGUF version 1 is not supported; supported: little-endian versions 2 and 3"),
        (header(version=4), "GGUF version 4 is not supported"),
        (header(version=0x3000000), "big-endian GGUF is not supported"),
        *((magic + bytes(20), "is a GGML file, from before GGUF") for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")),
    ],
)
def test_a_file_of_another_version_or_container_is_not_called_damaged(content, message, tmp_path):
    for name in ("model.gguf", "model.bin"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            read_source(tmp_path / name)


@pytest.mark.parametrize("ending", ["part1of2", "part-2of2", "split-a"])
def test_a_part_of_a_file_is_called_so(ending, tmp_path):
    path = tmp_path / f"model.gguf.{ending}"
    for content in (small_file(tmp_path / "model.gguf").read_bytes()[:-99], b"weights"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{ending}: is a part of a file; join"):
            read_source(path)


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_a_file_that_does_not_fit_into_memory_is_not_called_damaged(name, limit, tmp_path):
    num_bytes, path = 2**40, tmp_path / name
    tensor = json.dumps({"a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    head = header() if name == "model.gguf" else struct.pack("<Q", len(tensor)) + tensor
    path.write_bytes(head)
    os.truncate(path, len(head) + num_bytes)
    message = rf"{name}: not enough memory to map its 1099.51 GB; see `ulimit -v`"
    with limited(limit, 2**39), pytest.raises(CheckpointError, match=message):
        (open_gguf if name == "model.gguf" else read_safetensors)(path)


@pytest.mark.timeout(10)
def test_a_large_array_of_numbers_is_read_at_once(tmp_path):
    many = 5_000_000
    (tmp_path / "model.gguf").write_bytes(header() + field(ARRAY, struct.pack("<IQ", UINT8, many) + bytes(many)))
    assert len(read_header(tmp_path / "model.gguf")[0]["a"]) == many
