"""A replica to simulate: the costs of its Steps, its routing, and what requests and tokens cost beside the engine."""

from dataclasses import dataclass, field
from typing import Any

from nvium_core.choices import Schedule
from nvium_core.engine.params import EngineConfig, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities
from nvium_core.engine.schedule.policies import POLICIES, Policy
from nvium_core.engine.schedule.policies.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`routing` is p_k for every block. Steps run at `http_share` of their speed; each request and each emitted token
    adds its seconds (of HTTP, or of a head that `costs` leave out)."""

    costs: StepCosts
    routing: tuple[float, ...]
    config: EngineConfig = field(default_factory=EngineConfig)
    http_share: float = 1.0
    http_request_seconds: float = 0.0
    http_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        is_distribution = min(self.routing, default=-1) >= 0 and abs(sum(self.routing) - 1) <= 0.01
        require(is_distribution, "routing", f"probabilities must be at least 0 and sum to 1, got {self.routing}")
        blocks, exits = self.costs.num_blocks, len(self.routing)
        require(blocks == exits, "costs", f"are given for {blocks} blocks, the routing for {exits}")
        require(0 < self.http_share <= 1, "http-share", f"must be above 0 and at most 1, got {self.http_share}")
        require(self.http_request_seconds >= 0, "http-request-ms", "must not be negative")
        require(self.http_token_seconds >= 0, "http-token-ms", "must not be negative")

    @property
    def exit_probabilities(self) -> tuple[float, ...]:
        """w_k for every block."""
        return exit_probabilities(self.routing)

    @property
    def problem(self) -> Problem:
        return Problem.of(self.costs, self.exit_probabilities)

    def policy(self, schedule: Schedule | None = None) -> Policy:
        """A schedule (None: the configured one) that knows this machine's costs and routing."""
        frequencies = ExitFrequencies(self.exit_probabilities)
        return POLICIES[schedule or self.config.schedule].of(self.costs, frequencies, learns=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            "costs": self.costs.as_dict(),
            "routing": self.routing,
            "max_sequences": self.config.max_sequences,
            "http_share": self.http_share,
            "http_request_seconds": self.http_request_seconds,
            "http_token_seconds": self.http_token_seconds,
        }
