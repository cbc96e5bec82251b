"""Compiles the C++ of this folder once per instruction set, and loads it.

Reads the C++ structs that Python fills from their headers, which alone describe them.
"""

import ctypes
import errno
import hashlib
import logging
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path

logger = logging.getLogger(__name__)

FOLDER, SOURCE = Path(__file__).parent, "functions.cpp"
FLAGS = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4",), "neon": ()}
"""Compiler flags by instruction set. `baseline` runs on every x86-64 processor."""

COMPILER = ("c++", "-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")

PRECISIONS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""By precision of the model: suffix of the C++ function that runs Steps."""

COUNT, POINTER = ctypes.c_int64, ctypes.c_void_p

STRUCT = r"^(?:template <.*> )?struct {} {{\n(.*?)^}};"
BODY = re.compile(r"[^;{}]*\{[^{}]*\}")  # of a function
DECLARATION = re.compile(r"\s*(?:const )?(\w+)(?:<[^;]*>)?([ *][\w\s,*]*)")
NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


@cache
def native_library(instructions: str) -> ctypes.CDLL | None:
    """Return the library for these instructions. The first call compiles the library, which takes half a minute. If
    compiling or loading fails, log a warning and return None."""
    shipped = FOLDER / file_name(instructions)
    try:
        file = shipped if shipped.exists() else build(instructions, user_cache_path("nvium"))
        library = ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        cause = next((line for line in output if "error:" in line), str(error))
        if isinstance(error, FileNotFoundError):
            cause = f"no C++ compiler ({COMPILER[0]}) on PATH; install one, such as g++"
        logger.warning("no native layers, so PyTorch's slower layers run: %s", cause)
        return None
    arguments: dict[str, list[Any]] = {f"run_{precision}": [POINTER, POINTER] for precision in PRECISIONS.values()}
    arguments |= {"has_tiles": [], "packed_bytes": [COUNT, COUNT, COUNT], "pack": [POINTER, COUNT, POINTER]}
    arguments |= {"quantize": [POINTER, COUNT, COUNT, POINTER], "alone_nanoseconds": []}
    for name, types in arguments.items():
        function: Any = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = types, COUNT, check_result
    return library


def check_result(result: int, *_: object) -> int:
    """Return a native function's result. Raise `MemoryError` if memory ran out, `OSError` if a thread cannot start."""
    if result == -errno.ENOMEM:
        raise MemoryError
    if result < 0:
        raise OSError(f"cannot start a thread: {os.strerror(-result)}")
    return result


def build(instructions: str, folder: Path, target: str | None = None) -> Path:
    """Return the library's path. Compile it if needed. Raise `OSError` or `SubprocessError` if the compiler fails.

    target: platform for which ziglang compiles, such as aarch64-linux-gnu.2.28. By default c++ compiles for this one.
    """
    file = folder / file_name(instructions)
    folder.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".partial")  # one name, so that an interrupted compilation leaves nothing to collect
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            logger.info("compiling C++ kernels (%s); the first start takes half a minute longer", instructions)
            command = [*_command(instructions, target), str(FOLDER / SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603  a fixed command
            with made.open("rb") as written:
                os.fsync(written.fileno())  # a crash must not leave a renamed file without content
            made.replace(file)
    return file


def file_name(instructions: str) -> str:
    """Return the library's file name. It has a hash of sources and command, so that a stale library is never loaded."""
    content = b"".join(file.read_bytes() for file in sorted([FOLDER / SOURCE, *FOLDER.glob("*.h")]))
    digest = hashlib.sha256(content + " ".join(_command(instructions)).encode()).hexdigest()[:16]
    return f"nvium-{instructions}-{digest}.so"


def _command(instructions: str, target: str | None = None) -> tuple[str, ...]:
    command = (*COMPILER, *FLAGS[instructions])
    if target is None:
        return command
    options = (option.replace("-march=x86-64-", "-mcpu=x86_64_") for option in command[1:])
    return (sys.executable, "-m", "ziglang", "c++", "-target", target, "-s", *options)


@cache
def struct(name: str) -> Any:
    """Return the class of a C++ struct. Its instances have no other attributes than the fields.

    Raise `ValueError` if the struct contains anything but functions, pointers, `int64_t`, `double` and such structs.
    """
    text = re.sub("//.*", "", "".join(header.read_text(encoding="utf-8") for header in FOLDER.glob("*.h")))
    if not (found := re.search(STRUCT.format(name), text, re.MULTILINE | re.DOTALL)):
        raise ValueError(f"Python cannot fill a {name}")
    content, fields = found[1], list[tuple[str, type]]()
    while BODY.search(content):
        content = BODY.sub("", content)
    for declaration in content.split(";")[:-1]:
        if not (found := DECLARATION.fullmatch(declaration)):
            raise ValueError(f"Python cannot fill the field of {name}: {declaration.strip()}")
        kind, names = found.groups()
        pointer = ctypes.c_char_p if kind == "uint8_t" else ctypes.c_void_p
        for each in names.split(","):
            fields.append((each.strip(" *\n"), pointer if "*" in each else NUMBERS.get(kind) or struct(kind)))
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def make_struct(name: str, **values: object) -> Any:
    """Return a struct with a value for every field. Fields of None are zero."""
    kind = struct(name)
    assert values.keys() == {field for field, _ in kind._fields_}, f"{name} has other fields in its header"
    return kind(**{field: value for field, value in values.items() if value is not None})
