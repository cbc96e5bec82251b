"""Which block next? Small, torch-free, interchangeable answers."""

from nvium_core.choices import Schedule
from nvium_core.engine.policies.policy import Policy
from nvium_core.engine.policies.sweep import Sweep
from nvium_core.engine.policies.synchronous import Synchronous

POLICIES: dict[Schedule, type[Policy]] = {"sweep": Sweep, "synchronous": Synchronous}

__all__ = ["POLICIES", "Policy", "Sweep", "Synchronous"]
