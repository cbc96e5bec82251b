"""Settings of all tests.

One thread per process: faster for small matrices, and reproducible on any machine. Calibrations are written to a
temporary folder instead of the user's cache. `pytest --hypothesis-profile=thorough` runs ten times as many examples.
"""

import os
import tempfile

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

calibrations = tempfile.TemporaryDirectory(prefix="nvium-calibrations-")
os.environ["NVIUM_CALIBRATIONS"] = calibrations.name

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
