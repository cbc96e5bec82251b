"""Compiles the C++ of this folder once per instruction set, and loads it."""

import ctypes
import errno
import hashlib
import logging
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from nvium_core.engine.device.native.structs import FOLDER

logger = logging.getLogger(__name__)

SOURCE = "functions.cpp"
FLAGS = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4",), "neon": ()}
"""Compiler flags by instruction set. `baseline` runs on every x86-64 processor."""

COMPILER = ("c++", "-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")

PRECISIONS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""By precision of the model: suffix of the C++ function that runs Steps."""

COUNT, POINTER = ctypes.c_int64, ctypes.c_void_p


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
