"""Loads builds of llama.cpp. The package llama_cpp declares the functions; the library may be the package's or another.

The environment variable `LLAMA_CPP_LIB_PATH`, which is the package's own, names the folder of another build, such as
`bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.
"""

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from nvium_core.bench.contenders.contender import ContenderFailed

PACKAGE = "llama_cpp"

SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def builds() -> dict[str, Path]:
    """Return the folders of all builds by label. The label of the package's own build is empty."""
    spec, named = find_spec(PACKAGE), os.environ.get("LLAMA_CPP_LIB_PATH")
    folders = {"": Path(spec.origin).parent / "lib"} if spec and spec.origin else {}
    folders |= {Path(named).name: Path(named)} if named else {}
    return {label: folder for label, folder in folders.items() if _library_file(folder)}


def load(folder: Path) -> Any:
    """Return the functions of llama_cpp, which run the build in `folder`. A process can load one build."""
    spec = find_spec(PACKAGE)
    file = _library_file(folder)
    assert spec is not None and file is not None
    sys.modules[PACKAGE] = module_from_spec(spec)  # without running it, which would load the package's own build
    library = Library(str(file))
    extensions: Any = import_module(f"{PACKAGE}._ctypes_extensions")
    extensions.load_shared_library = lambda *_: library
    library.llama_log_set(SILENCE, None)
    if not library.ggml_backend_dev_count():  # the build has a library of kernels per kind of processor
        library.ggml_backend_load_all_from_path(str(folder).encode())
    return import_module(f"{PACKAGE}.llama_cpp")


def _library_file(folder: Path) -> Path | None:
    """Return libllama.so, also if its name has a version."""
    return next(folder.glob("libllama.*"), None)


class Library(ctypes.CDLL):
    """A library of another version than the declarations. A function that it lacks fails only when it is called."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise

        def missing(*_: object) -> None:
            raise ContenderFailed(f"this build of llama.cpp lacks {name}")

        return missing
