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

from nvium_core.checksums import checksum, sync
from nvium_core.engine.device.native.instructions import FLAGS, available

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = "functions.cpp"
CHECKSUM = ".crc32"
COMPILER = ("c++", "-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi")

PRECISIONS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What functions are called for, by the precision of the cache."""

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


@cache
def native_library(instructions: str | None = None) -> ctypes.CDLL | None:
    """The functions for these instructions, None being the widest, or None, and a warning, where they cannot be had.
    Compiling them takes half a minute, once."""
    try:
        library = ctypes.CDLL(str(_found_or_built(instructions or available()[-1])))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.warning(
            "no native layers, so PyTorch's slower ones run; install a C++ compiler such as g++: %s\n%s",
            error,
            said.decode(errors="replace"),
        )
        return None
    for precision in PRECISIONS.values():
        run = getattr(library, f"run_{precision}")
        run.argtypes, run.restype = [POINTER, POINTER], None
    for name in ("vector_bytes", "has_tiles"):
        function = getattr(library, name)
        function.argtypes, function.restype = [], COUNT
    library.uniforms.argtypes, library.uniforms.restype = [POINTER, POINTER, COUNT, COUNT, POINTER, COUNT], None
    draw = library.draw  # an item of the library would be another object at every use
    draw.argtypes, draw.restype = [POINTER, COUNT, COUNT, POINTER, POINTER], None
    return library


def build(instructions: str, folder: Path) -> Path:
    """The library's file in a folder, compiled unless a whole one is there. Raises `OSError` or `SubprocessError`."""
    file = folder / file_name(instructions)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not is_whole(file):
            if file.exists():
                logger.warning("%s is damaged and is compiled again", file)
            made = Path(scratch) / file.name
            command = [*_command(instructions), str(FOLDER / SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603  all of it is known
            sync(made)
            made.replace(file)
            file.with_suffix(CHECKSUM).write_text(checksum(file))
    return file


def is_whole(file: Path) -> bool:
    """Whether a library is as it was compiled: loading a damaged one may end the process."""
    sidecar = file.with_suffix(CHECKSUM)
    return file.exists() and sidecar.exists() and sidecar.read_bytes() == checksum(file).encode()


def file_name(instructions: str) -> str:
    """What the library is made of is part of its name, so that a stale one is never taken."""
    content = b"".join(file.read_bytes() for file in sorted([FOLDER / SOURCE, *FOLDER.glob("*.h")]))
    digest = hashlib.sha256(content + " ".join(_command(instructions)).encode()).hexdigest()[:16]
    return f"nvium-{instructions}-{digest}.so"


def _found_or_built(instructions: str) -> Path:
    shipped = FOLDER / file_name(instructions)
    return shipped if is_whole(shipped) else build(instructions, user_cache_path("nvium"))


def _command(instructions: str) -> tuple[str, ...]:
    return (*COMPILER, *FLAGS[instructions])
