"""Every build that this processor can run."""

import ctypes
from typing import get_args

import pytest

from nvium_core.choices import Instructions
from nvium_core.engine.device import native

BUILDS = [name for name in get_args(Instructions) if name != "auto"]


@pytest.fixture(scope="session", params=BUILDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The native functions for each kind of instructions."""
    if request.param not in native.available():
        pytest.skip(f"this processor has only {', '.join(native.available())}")
    return compiled(request.param)


@pytest.fixture(scope="session")
def widest_library() -> ctypes.CDLL:
    return compiled(native.instructions())


def compiled(instructions: str) -> ctypes.CDLL:
    library = native.native_library(instructions)
    if library is None:
        pytest.skip("no C++ compiler here")
    return library
