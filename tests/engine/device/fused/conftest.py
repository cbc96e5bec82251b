"""Without a GPU, Triton's interpreter runs the kernels."""

import pytest

pytest.importorskip("triton")
