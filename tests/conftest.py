"""One thread per test process: small matrices run faster so, and results do not depend on the machine.

Servers keep what they measure in a folder of the run's own, not in the user's cache.

`pytest --hypothesis-profile=thorough` tries ten times as many examples.
"""

import os
import tempfile

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

kept = tempfile.TemporaryDirectory(prefix="nvium-calibrations-")
os.environ["NVIUM_CALIBRATIONS"] = kept.name

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
