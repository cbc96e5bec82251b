"""Every build that this processor can run."""

from typing import get_args

import pytest

from nvium_core.choices import Instructions
from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library

BUILDS = [name for name in get_args(Instructions) if name != "auto"]


@pytest.fixture(scope="session", params=BUILDS)
def instructions(request: pytest.FixtureRequest) -> Instructions:
    name: Instructions = request.param
    if name not in processor.available():
        pytest.skip(f"this processor has only {', '.join(processor.available())}")
    if library.native_library(name) is None:
        pytest.skip("no C++ compiler here")
    return name


@pytest.fixture(scope="session")
def builds() -> list[Instructions]:
    """All builds, for tests whose reference takes longer than the kernels."""
    found = [name for name in BUILDS if name in processor.available() and library.native_library(name)]
    return found or pytest.skip("no C++ compiler here")
