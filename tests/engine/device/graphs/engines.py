"""Engines on `GraphsBackend` with PyTorch's operators in place of Triton's kernels, on any device."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nvium_core import Engine, EngineConfig, NviumForCausalLM
from nvium_core.engine.device.attention import cached_attention, ragged
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.graphs.capture import Fence
from nvium_core.engine.device.inputs import InputViews
from nvium_core.engine.device.paged_cache import PagedCache, Read
from nvium_core.model.llama import dense_attention
from nvium_core.model.plan import LayerCall
from tests.engine.driving import engine_on


def gathered(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    """Attend with one row per sequence, in operators that a CUDA graph can capture."""
    within_page = torch.arange(cache.page_size, device=table_RW.device)
    slot_RS = (table_RW[:, :, None] * cache.page_size + within_page).flatten(1)
    position_S = torch.arange(slot_RS.shape[1], device=table_RW.device)
    is_seen_RS = position_S <= position_R[:, None]
    slot_RS = slot_RS.where(is_seen_RS, cache.null_slot)  # the mask would not stop a NaN of another sequence

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        first_R = position_R + 1 - (call.window or len(position_S))
        seen_RS = is_seen_RS & (position_S >= first_R[:, None])
        known = (tensor[call.cache, slot_RS].to(q_RHP.dtype) for tensor in (cache.keys, cache.values))
        k_RGSP, v_RGSP = (tensor.transpose(1, 2) for tensor in known)
        return dense_attention(q_RHP[:, :, None], k_RGSP, v_RGSP, call, seen_RS[:, None, None])[:, :, 0]

    return attend


class PlainLayers:
    def __init__(self, model: NviumForCausalLM, cache: PagedCache) -> None:
        self.model, self.cache = model, cache

    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor) -> None:
        backbone, cache = self.model.model, self.cache
        slot_R, position_R, source_R = (inputs.rows[name] for name in ("slot", "position", "source"))
        if blocks.start:
            h_RD = cache.states_NSD[blocks.start - 1, slot_R]
        else:
            emitted_R = previous_R[source_R.clamp(min=0)].clamp(min=0).long()
            h_RD = backbone.embed(torch.where(source_R < 0, inputs.rows["token"], emitted_R))
        attend = cached_attention(cache, slot_R, gathered(cache, inputs.table_RW, position_R))
        rotary = backbone.rotary_emb(position_R, h_RD.dtype)
        for block in blocks:
            h_RD = backbone.run(h_RD, backbone.blocks[block], rotary, attend)
            cache.states_NSD[block, slot_R] = h_RD


class PlainGraphs(GraphsBackend):
    max_changes = 64

    def __init__(self, model: NviumForCausalLM, cache: PagedCache, *fence: Callable[[torch.device], Fence]) -> None:
        super().__init__(model, cache, PlainLayers(model, cache).run, ragged, *fence)


def graphs_engine(model: NviumForCausalLM, config: EngineConfig) -> Engine:
    return engine_on(lambda model, cache, _: PlainGraphs(model, cache), model, replace(config, deterministic=False))
