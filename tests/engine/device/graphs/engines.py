"""Engines that run over fixed buffers wherever they are."""

from dataclasses import replace
from functools import partial

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult


class Counting(GraphsBackend):
    """Notes the Steps and how many tokens a sequence emitted at most in each."""

    def __init__(self, model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> None:
        super().__init__(model, cache)
        self.most_emitted: list[int] = []

    def run(self, step: Step, max_rows: int) -> StepResult:
        result = super().run(step, max_rows)
        self.most_emitted.append(max(len(outcome.emissions) for outcome in result.outcomes))
        return result


def graphs_engine(model: NviumForCausalLM, config: EngineConfig) -> Engine:
    """As an engine on a GPU."""
    config = replace(config, deterministic=False)
    return Engine(model, config, make_runner=partial(Runner, make_backend=Counting))


def backend_of(engine: Engine) -> Counting:
    backend = engine.runner.backend
    assert isinstance(backend, Counting)
    return backend
