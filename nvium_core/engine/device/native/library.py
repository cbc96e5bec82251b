"""The compiled functions of this folder: built once for each kind of instructions, by the C++ compiler there is."""

import ctypes
import hashlib
import logging
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from nvium_core.engine.device.native.instructions import FLAGS, available

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = "functions.cpp"
HEADERS = (
    "arithmetic.h",
    "block.h",
    "draw.h",
    "exits.h",
    "matrix.h",
    "randomness.h",
    "score.h",
    "step.h",
    "team.h",
    "truncation.h",
)
COMPILER = ("c++", "-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")

PRECISIONS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What functions are called for, by the precision of the cache."""

POINTER, COUNT, THREADS, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool
SIGNATURES = {
    "run": (COUNT, [POINTER, COUNT, FLAG, POINTER, THREADS]),
    "route": (None, [*[POINTER] * 4, COUNT, POINTER, POINTER, THREADS]),
    "logits": (None, [*[POINTER] * 4, COUNT, THREADS]),
    "sample": (None, [*[POINTER] * 4, COUNT, POINTER, POINTER, THREADS]),
    "score": (None, [POINTER, POINTER, COUNT, POINTER, COUNT, POINTER, THREADS]),
}
"""Of functions that there is one of for every precision."""


@cache
def native_library(instructions: str | None = None) -> ctypes.CDLL | None:
    """The functions for these instructions, None being the widest, or None, and a warning, where they cannot be had.
    Compiling them takes half a minute, once."""
    try:
        library = ctypes.CDLL(str(_found_or_built(instructions or available()[-1])))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.warning("no native layers, PyTorch's own are slower: %s\n%s", error, said.decode(errors="replace"))
        return None
    for function, (result, arguments) in SIGNATURES.items():
        for precision in PRECISIONS.values():
            entry = getattr(library, f"{function}_{precision}")
            entry.argtypes, entry.restype = arguments, result
    library.vector_bytes.argtypes, library.vector_bytes.restype = [], COUNT
    library.uniforms.argtypes, library.uniforms.restype = [POINTER, POINTER, COUNT, COUNT, POINTER, COUNT], None
    draw = library.draw  # an item of the library would be another object at every use
    draw.argtypes, draw.restype = [POINTER, COUNT, COUNT, POINTER, POINTER], None
    return library


def build(instructions: str, folder: Path) -> Path:
    """The library's file in a folder, compiled unless it is there. Raises `OSError` or `SubprocessError`."""
    file = folder / file_name(instructions)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not file.exists():
            made = Path(scratch) / file.name
            command = [*_command(instructions), str(FOLDER / SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603  all of it is known
            made.replace(file)
    return file


def file_name(instructions: str) -> str:
    """What the library is made of is part of its name, so that a stale one is never taken."""
    content = b"".join((FOLDER / name).read_bytes() for name in (SOURCE, *HEADERS))
    digest = hashlib.sha256(content + " ".join(_command(instructions)).encode()).hexdigest()[:16]
    return f"nvium-{instructions}-{digest}.so"


def _found_or_built(instructions: str) -> Path:
    shipped = FOLDER / file_name(instructions)
    return shipped if shipped.exists() else build(instructions, user_cache_path("nvium"))


def _command(instructions: str) -> tuple[str, ...]:
    return (*COMPILER, *FLAGS[instructions])
