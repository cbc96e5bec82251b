"""Which block next? Small, torch-free, interchangeable answers."""

from nvium_core.choices import Schedule
from nvium_core.engine.schedule.policies.optimal import Optimal
from nvium_core.engine.schedule.policies.policy import Policy
from nvium_core.engine.schedule.policies.sweep import Sweep
from nvium_core.engine.schedule.policies.synchronous import Synchronous

POLICIES: dict[Schedule, type[Policy]] = {"optimal": Optimal, "sweep": Sweep, "synchronous": Synchronous}
"""`POLICIES[name].of(costs, frequencies)` makes one."""

__all__ = ["POLICIES", "Optimal", "Policy", "Sweep", "Synchronous"]
