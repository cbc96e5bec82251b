"""Compiles the C++ of these tests."""

import hashlib
import os
import subprocess
from pathlib import Path

from platformdirs import user_cache_path

from nvium_core.engine.device.native.structs import FOLDER


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
