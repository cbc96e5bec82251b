"""Engines whose Steps of few rows go over fixed buffers wherever they run, and Steps by hand."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step
from tests.engine.cached_blocks import NUM_PAGES

NUM_CANDIDATES = 3
"""Of a small vocabulary's tokens: often not enough."""


def graphs_engine(model: NviumForCausalLM, config: EngineConfig, *, is_at_once: bool = True) -> Engine:
    """As an engine on a GPU; `is_at_once` says whether all heads count as light. What is ranked, are few candidates."""
    light_head_bytes = 2**40 if is_at_once else 0
    make_backend = partial(GraphsBackend, light_head_bytes=light_head_bytes, num_candidates=NUM_CANDIDATES)
    return Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))


def backend_of(engine: Engine) -> GraphsBackend:
    backend = engine.runner.backend
    assert isinstance(backend, GraphsBackend)
    return backend


@dataclass
class Cached:
    """A model with a cache of its own."""

    model: NviumForCausalLM
    has_graphs: bool
    page_size: int = 16
    cache: PagedCache = field(init=False)

    def __post_init__(self) -> None:
        like = self.model.lm_head.weight
        self.cache = PagedCache(self.model.config, num_pages=NUM_PAGES, page_size=self.page_size, like=like)
        self.graphs = GraphsBackend(self.model, self.cache)
        self.backend = self.graphs if self.has_graphs else LayersBackend(self.model, self.cache)

    @torch.inference_mode()
    def carry(self, block: int, sequences: list[Sequence], rows: list[range]) -> None:
        step = Step(block, [Run(s, own, False) for s, own in zip(sequences, rows, strict=True) if own])
        assert self.graphs.parts(step.runs) == [step.runs]
        self.backend.run(step)

    @property
    def kept(self) -> list[Tensor]:
        """All that is somebody's, and what padding sees."""
        somebodys = slice(0, self.cache.null_slot + 1)
        return [x[:, somebodys] for x in (self.cache.keys, self.cache.values, self.cache.states_NSD)]
