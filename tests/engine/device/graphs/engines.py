"""Engines on `GraphsBackend`, on any device."""

from dataclasses import replace

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.step import Step, StepResult
from tests.engine.driving import engine_on


class Counting(GraphsBackend):
    """Records the maximum number of tokens per sequence in each Step."""

    def __init__(self, model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> None:
        super().__init__(model, cache)
        self.most_emitted: list[int] = []

    def run(self, step: Step, max_rows: int) -> StepResult:
        result = super().run(step, max_rows)
        self.most_emitted.append(max(len(outcome.emissions) for outcome in result.outcomes))
        return result


def graphs_engine(model: NviumForCausalLM, config: EngineConfig) -> Engine:
    return engine_on(Counting, model, replace(config, deterministic=False))
