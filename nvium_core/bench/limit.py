"""The limit of the speed-up over `synchronous`, from what Steps cost, and shares of it.

An early exit saves the fixed cost of Steps; a row's own cost is never saved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.calibration import wait_for
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import exit_probabilities, reach_probabilities

MAX_FITTED_ROWS = 8
"""Rows up to which a Step's cost is fitted: one sequence rarely defers more."""

TURNS, REPLAYS = 3, 10


def limit(fixed: Sequence[float], per_row: Sequence[float], head: float, routing: Sequence[float]) -> float:
    """(Σ_k (a_k + b_k) + h) / (Σ_k P(depth ≥ k)·a_k + Σ_k b_k + h) for one sequence: a block costs a_k + b_k·r for r
    rows, a token's head h. `routing` is p_k."""
    return (sum(fixed) + sum(per_row) + head) / token_seconds(fixed, per_row, head, routing)


def token_seconds(fixed: Sequence[float], per_row: Sequence[float], head: float, routing: Sequence[float]) -> float:
    reached = reach_probabilities(exit_probabilities(routing))
    return sum(p * a for p, a in zip(reached, fixed, strict=True)) + sum(per_row) + head


def share_of_gain(ratio: float, best: float) -> float | None:
    """(ratio − 1) / (best − 1); None where nothing can be gained."""
    return (ratio - 1) / (best - 1) if best > 1 else None


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """In seconds: Steps by rows and fronts; a junction for each front routed; a head with its draw for each token."""

    blocks: StepCosts
    junction: float
    head: float

    def limit(self, routing: Sequence[float]) -> float:
        """The junction is part of its block's fixed cost. This is the figure that pages claim."""
        return limit(self._with_junctions, self._few_rows.per_row, self.head, routing)

    def seconds(self, routing: Sequence[float]) -> float:
        """Of a token at the limit; of a model without exits, `routing` is [1]."""
        return token_seconds(self._with_junctions, self._few_rows.per_row, self.head, routing)

    def limit_with_junctions_paid(self, routing: Sequence[float]) -> float:
        """Both schedules pay the same junctions, as they do: a row that has emitted is not routed again."""
        return limit(self._few_rows.fixed, self._few_rows.per_row, self.per_token(routing), routing)

    def per_token(self, routing: Sequence[float]) -> float:
        """Junctions and head of a token under any schedule."""
        return self.junction * sum(reach_probabilities(exit_probabilities(routing))) + self.head

    @property
    def _with_junctions(self) -> list[float]:
        return [a + self.junction for a in self._few_rows.fixed]

    @property
    def _few_rows(self) -> StepCosts:
        points = self.blocks.points.items()
        return StepCosts({block: {r: s for r, s in costs.items() if r <= MAX_FITTED_ROWS} for block, costs in points})

    def as_dict(self) -> dict[str, object]:
        """Milliseconds, and the blocks' seconds by rows."""
        return {
            **self.blocks.as_dict(),
            "fixed_ms": [1000 * seconds for seconds in self._few_rows.fixed],
            "per_row_ms": [1000 * seconds for seconds in self._few_rows.per_row],
            "junction_ms": 1000 * self.junction,
            "head_ms": 1000 * self.head,
        }


def measured_costs(engine: Engine, prompt: list[int], num_tokens: int) -> TokenCosts:
    """Of a calibrated, idle engine, with every seat taken; the least of `TURNS` counts, as for blocks."""
    assert engine.costs is not None
    junctions, heads = zip(*(_at_exits(engine, prompt, num_tokens) for _ in range(TURNS)), strict=True)
    return TokenCosts(blocks=engine.costs, junction=min(junctions), head=min(heads))


def _at_exits(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """Seconds of a junction for each front routed, and of a head with its draw for each token."""
    if isinstance(engine.runner.backend, GraphsBackend):
        return _replayed_at_exits(engine.runner.backend, engine.config.max_sequences)
    before = engine.runner.part_seconds
    params = SamplingParams(max_tokens=num_tokens, sampling="exits", ignore_eos=True)
    completions = engine.generate([prompt] * engine.config.max_sequences, params)
    router, head = (engine.runner.part_seconds[part] - before[part] for part in ("router", "head"))
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_routed = sum(exit_ for completion in completions for exit_ in completion.exits)
    return router / num_routed, head / num_tokens


@torch.inference_mode()
def _replayed_at_exits(backend: GraphsBackend, num_fronts: int) -> tuple[float, float]:
    """By themselves, as a pass has them in its one graph; the junction with the copy that brings its answers."""
    backend.inputs.clear(backend.inputs.sizes(num_fronts, 1, num_fronts))
    blocks, padded = range(backend.model.config.num_exits), power_of_two(num_fronts)

    def route(block: int) -> None:
        backend.replay.run(*backend.route_graph(block, padded))
        backend.told.copy_(backend.answers)

    def draw() -> None:
        backend.replay.run(*backend.draw_graph(blocks[-1], padded, is_ranked=False))
        wait_for(backend.model.device)

    routers = [least_seconds(partial(route, block)) for block in blocks]
    return sum(routers) / len(routers) / num_fronts, least_seconds(draw) / num_fronts


def least_seconds(function: Callable[[], None]) -> float:
    times = []
    for _ in range(REPLAYS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
