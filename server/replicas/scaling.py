"""How many replicas are wanted, from the sequences that run and wait. Knows no HTTP."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

SEQUENCES = "sequences"
"""The statistic in which a replica reports its sequences, running and waiting."""


class BySequences:
    """Ray's autoscaling policy; Ray applies bounds and delays."""

    def __init__(self, sequences_per_replica: int) -> None:
        self._sequences_per_replica = sequences_per_replica

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        counts = (context.aggregated_metrics or {}).get(SEQUENCES, {})
        return math.ceil(sum(counts.values()) / self._sequences_per_replica), {}
