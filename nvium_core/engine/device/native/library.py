"""The compiled functions of this folder: built once for a kind of processor, by whichever C++ compiler is there."""

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

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = "functions.cpp"
HEADERS = ("arithmetic.h", "block.h", "draw.h", "exits.h", "projection.h", "randomness.h", "step.h")
COMPILER = ("c++", "-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
PROCESSORS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
"""Flags by what PyTorch calls a processor's capability; any other gets what every processor of its kind has."""

PRECISIONS = {
    (torch.float64, torch.float64): "float64_float64",
    (torch.float32, torch.float32): "float32_float32",
    (torch.float32, torch.bfloat16): "float32_bfloat16",
    (torch.bfloat16, torch.bfloat16): "bfloat16_bfloat16",
}
"""What functions are called for, by the precision of the cache and that of weights."""

POINTER, COUNT, THREADS, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool
SIGNATURES = {
    "run": (COUNT, [POINTER, COUNT, FLAG, POINTER, THREADS]),
    "route": (None, [*[POINTER] * 4, COUNT, POINTER, POINTER, THREADS]),
    "logits": (None, [*[POINTER] * 4, COUNT, THREADS]),
    "speak": (None, [*[POINTER] * 4, COUNT, POINTER, POINTER, THREADS]),
}
"""Of functions that there is one of for every precision."""


@cache
def native_library() -> ctypes.CDLL | None:
    """The functions, or None, and a warning, where they cannot be had. Compiling them takes half a minute, once."""
    try:
        library = ctypes.CDLL(str(_found_or_built(torch.backends.cpu.get_cpu_capability())))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.warning("no native layers, PyTorch's own are slower: %s\n%s", error, said.decode(errors="replace"))
        return None
    for function, (result, arguments) in SIGNATURES.items():
        for precision in PRECISIONS.values():
            entry = getattr(library, f"{function}_{precision}")
            entry.argtypes, entry.restype = arguments, result
    library.uniform.argtypes, library.uniform.restype = [*[COUNT] * 4, ctypes.c_char_p], ctypes.c_double
    draw = library.draw  # an item of the library would be another object at every use
    draw.argtypes, draw.restype = [POINTER, COUNT, COUNT, POINTER, POINTER], None
    return library


def build(processor: str, folder: Path) -> Path:
    """The library's file in a folder, compiled unless it is there. Raises `OSError` or `SubprocessError`."""
    file = folder / file_name(processor)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not file.exists():
            made = Path(scratch) / file.name
            command = [*_command(processor), str(FOLDER / SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603  all of it is known
            made.replace(file)
    return file


def file_name(processor: str) -> str:
    """What the library is made of is part of its name, so that a stale one is never taken."""
    content = b"".join((FOLDER / name).read_bytes() for name in (SOURCE, *HEADERS))
    digest = hashlib.sha256(content + " ".join(_command(processor)).encode()).hexdigest()[:16]
    return f"nvium-{processor.lower().replace(' ', '-')}-{digest}.so"


def _found_or_built(processor: str) -> Path:
    shipped = FOLDER / file_name(processor)
    return shipped if shipped.exists() else build(processor, user_cache_path("nvium"))


def _command(processor: str) -> tuple[str, ...]:
    return (*COMPILER, *PROCESSORS.get(processor, ()))
