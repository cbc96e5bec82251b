"""Engines on `GraphsBackend` with PyTorch's operators in place of Triton's kernels, on any device."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.attention import ragged, written
from nvium_core.engine.device.decide import EMITTED, decide
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.graphs.replay import Fence
from nvium_core.engine.device.inputs import Front, InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache, Read
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.llama import dense_attention
from tests.engine.driving import engine_on


def gathered(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    """Attend with one row per sequence, in operators that a CUDA graph can capture."""
    within_page = torch.arange(cache.page_size, device=table_RW.device)
    slot_RS = (table_RW[:, :, None] * cache.page_size + within_page).flatten(1)
    is_seen_RS = torch.arange(slot_RS.shape[1], device=table_RW.device) <= position_R[:, None]
    slot_RS = slot_RS.where(is_seen_RS, cache.null_slot)  # the mask would not stop a NaN of another sequence

    def attend(q_RHP: Tensor, layer: int) -> Tensor:
        k_RGSP, v_RGSP = (tensor[layer, slot_RS].transpose(1, 2) for tensor in (cache.keys, cache.values))
        return dense_attention(q_RHP[:, :, None], k_RGSP, v_RGSP, is_seen_RS[:, None, None])[:, :, 0]

    return attend


class PlainPass:
    """The layers and the decisions of a pass."""

    def __init__(self, model: NviumForCausalLM, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self.needed = Variant(0, is_ranked=True, has_original=True)
        """What the next call needs. A graph has to compute all of it."""

    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor) -> None:
        backbone, cache = self.model.model, self.cache
        slot_R, position_R, source_R = (inputs.rows[name] for name in ("slot", "position", "source"))
        if blocks.start:
            h_RD = cache.states_NSD[blocks.start - 1, slot_R]
        else:
            emitted_R = previous_R[source_R.clamp(min=0)].clamp(min=0).long()
            h_RD = backbone.embed_tokens(torch.where(source_R < 0, inputs.rows["token"], emitted_R))
        attend = written(cache, slot_R, gathered(cache, inputs.table_RW, position_R))
        rotary = backbone.rotary_emb(position_R, h_RD.dtype)
        for block in blocks:
            h_RD = backbone.run(h_RD, backbone.blocks[block], rotary, attend)
            cache.states_NSD[block, slot_R] = h_RD

    def decide(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        mixes = variant.mixes or self.model.config.num_exits == 1
        needed = self.needed
        variant = variant._replace(mixes=mixes, is_ranked=needed.is_ranked, has_original=needed.has_original)
        inputs = without_unused(inputs) if variant.num_changes else inputs
        found_4F = decide(self.model, self.cache.states_NSD, blocks, inputs, variant)
        answers_4F[:, : variant.num_rows] = found_4F

    def route(self, blocks: range, inputs: InputViews, answers_4F: Tensor) -> None:
        self.decide(blocks, inputs, Variant(len(inputs.rows["rule"])), answers_4F)
        answers_4F[EMITTED] = torch.nan

    def draw(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        self.decide(blocks, inputs, variant, answers_4F)


def without_unused(inputs: InputViews) -> InputViews:
    """Replace entries that are not in use by the first one, or by one that changes nothing."""
    neutral_5 = torch.stack([*inputs.entries_C5.new_zeros(2), *inputs.values_C5.new_tensor([1, 0, 0]).view(torch.long)])
    is_used_C1 = torch.arange(len(inputs.entries_C5), device=inputs.used.device)[:, None] < inputs.used
    first_15 = torch.where(inputs.used > 0, inputs.entries_C5[:1], neutral_5)
    entries_C5 = torch.where(is_used_C1, inputs.entries_C5, first_15)
    return inputs._replace(entries_C5=entries_C5, values_C5=entries_C5.view(torch.float64))


class PlainGraphs(GraphsBackend):
    max_changes = 64

    def __init__(
        self, model: NviumForCausalLM, cache: PagedCache, make_fence: Callable[[torch.device], Fence] = Fence
    ) -> None:
        self.plain = PlainPass(model, cache)
        super().__init__(model, cache, self.plain, self.plain, ragged, make_fence)

    def _variant(self, blocks: range, rows: Sequence[Rows], fronts: Sequence[Front]) -> Variant | str:
        if not self.replay.graphs:
            self.plain.needed = self.inputs.variant(fronts, is_last=blocks.stop == self.num_blocks)
        return super()._variant(blocks, rows, fronts)


def graphs_engine(model: NviumForCausalLM, config: EngineConfig) -> Engine:
    return engine_on(lambda model, cache, _: PlainGraphs(model, cache), model, replace(config, deterministic=False))
