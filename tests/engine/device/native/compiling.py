"""Compiles the C++ of these tests, and skips tests without a compiler."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library
from nvium_core.engine.device.native.library import FOLDER

has_library = library.native_library(processor.instructions()) is not None
needs_compiler = pytest.mark.skipif(not has_library, reason="needs a C++ compiler")


def compiled(source: str, *compiler: str) -> Path:
    """Compile a file of this folder, once per version of the sources. Tests may run in parallel."""
    file = Path(__file__).parent / source
    headers = sorted((*FOLDER.glob("*.h"), *file.parent.glob("*.h")))
    content = b"".join(each.read_bytes() for each in (*headers, file))
    digest = hashlib.sha256(content + " ".join(compiler).encode()).hexdigest()[:16]
    folder = user_cache_path("nvium") / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{file.stem}-{digest}"
    if not made.exists():
        command = [*compiler, "-std=c++20", "-pthread", "-Wno-psabi", f"-I{FOLDER}", str(file)]
        begun = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(begun)], check=True)
        begun.replace(made)
    return made


def printed(source: str, *compiler: str) -> str:
    """Compile and run a program of this folder, and return what it prints."""
    program = compiled(source, *compiler)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
