"""Engines whose Steps of few rows are static wherever they run, and Steps by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.graphs import StaticSteps
from nvium_core.engine.device.junction import Junctions
from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.device.layers.blocks import PlainBlocks
from nvium_core.engine.device.layers.exits import PlainExits
from nvium_core.engine.schedule.scheduler import Run, Step
from nvium_core.engine.schedule.sequence import Sequence
from tests.engine.cached_blocks import NUM_PAGES


def static_engine(model: NviumForCausalLM, config: EngineConfig, *, is_at_once: bool = True) -> Engine:
    """As an engine on a GPU; `is_at_once` says whether all heads count as light."""
    engine = Engine(model, config)
    runner = engine.runner
    runner._native = None
    exits = PlainExits(model, runner._states_2SD)
    runner._junctions = Junctions(model, exits, max_sequences=engine.config.max_sequences)
    runner._static = runner._static_steps()
    runner._static._has_light_head = is_at_once
    return engine


@dataclass
class Cached:
    """A model's blocks with a cache of their own."""

    model: NviumForCausalLM
    is_static: bool
    page_size: int = 16

    def __post_init__(self) -> None:
        like = self.model.lm_head.weight
        self.cache = PagedAttention(self.model.config, num_pages=NUM_PAGES, page_size=self.page_size, like=like)
        self.states_2SD = like.new_zeros(2, self.cache.num_slots, self.model.config.hidden_size)
        plain = PlainBlocks(self.model, self.cache, self.states_2SD)
        self.static = StaticSteps(self.model, self.cache, self.states_2SD)
        self.blocks = self.static if self.is_static else plain

    @torch.inference_mode()
    def carry(self, block: int, sequences: list[Sequence], rows: list[range]) -> None:
        step = Step(block, [Run(s, own, False) for s, own in zip(sequences, rows, strict=True) if own])
        assert self.static.suits(step)
        self.blocks.carry(step)

    @property
    def kept(self) -> list[Tensor]:
        """All that is somebody's, and what padding sees."""
        somebodys = slice(0, self.cache.null_slot + 1)
        return [self.cache.keys[:, somebodys], self.cache.values[:, somebodys], self.states_2SD[:, somebodys]]
