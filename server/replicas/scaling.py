"""How many replicas are wanted: as many as give each its share of the sequences that run and wait. Knows no HTTP."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

SEQUENCES = "sequences"
"""The name under which a replica tells how many it has, running and waiting."""


class BySequences:
    """Ray's autoscaling policy. The bounds and the delays are Ray's to apply."""

    def __init__(self, sequences_per_replica: int) -> None:
        self._sequences_per_replica = sequences_per_replica

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        counts = (context.aggregated_metrics or {}).get(SEQUENCES, {})
        return math.ceil(sum(counts.values()) / self._sequences_per_replica), {}
