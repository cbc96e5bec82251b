"""One thread per test process: small matrices run faster so, and results do not depend on the machine.

`pytest --hypothesis-profile=thorough` tries ten times as many examples.
"""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
