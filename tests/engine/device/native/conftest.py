"""Every build that this processor can run."""

import ctypes
from typing import get_args

import pytest

from nvium_core.choices import Instructions
from nvium_core.engine.device import native

BUILDS = [name for name in get_args(Instructions) if name != "auto"]


@pytest.fixture(scope="session", params=BUILDS)
def instructions(request: pytest.FixtureRequest) -> Instructions:
    name: Instructions = request.param
    if name not in native.available():
        pytest.skip(f"this processor has only {', '.join(native.available())}")
    if native.native_library(name) is None:
        pytest.skip("no C++ compiler here")
    return name


@pytest.fixture(scope="session")
def library(instructions: Instructions) -> ctypes.CDLL:
    library = native.native_library(instructions)
    assert library is not None
    return library
