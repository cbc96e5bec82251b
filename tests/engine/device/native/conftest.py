"""Every build that this processor can run."""

from typing import get_args

import pytest

from nvium_core.choices import Instructions
from nvium_core.engine.device import native, processor


@pytest.fixture(scope="session", params=[name for name in get_args(Instructions) if name != "auto"])
def instructions(request: pytest.FixtureRequest) -> Instructions:
    name: Instructions = request.param
    if name not in processor.available():
        pytest.skip(f"this processor has only {', '.join(processor.available())}")
    if native.native_library(name) is None:
        pytest.skip("no C++ compiler here")
    return name
