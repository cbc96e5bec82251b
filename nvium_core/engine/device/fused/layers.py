"""The layers of a pass over few rows, with Triton kernels, and attention over the paged cache for any number of rows.

`Nvium`'s modules are the reference of the layers, `ragged` of ../attention.py that of attention, which serves every
call of a plan, any number of query heads per key head and any page size.

Shapes: R rows, D width, I inner width, B tiles, H query heads, G key heads, P head size, W pages of a table.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nvium_core.engine.device.fused import kernels
from nvium_core.engine.device.inputs import InputViews
from nvium_core.engine.device.paged_cache import PagedCache, Read, power_of_two, upload_all
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.llama import Attention, FeedForward, Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import LayerCall

NUM_PROGRAMS = 264
"""Twice the multiprocessors of a large GPU. Rows with fewer programs split their keys among several."""

MAX_SPLITS, MIN_SPLIT_KEYS = 32, 256
KEY_BLOCK, MIN_TILE, ROWS_PER_TILE = 32, 16, 16


def ragged_in_tiles(cache: PagedCache, runs: Items[Rows]) -> Read:
    """Attend with runs of any length, in tiles of `ROWS_PER_TILE` rows."""
    first, found = 0, list[tuple[int, int, int, int]]()
    for number, run in enumerate(runs):
        for start in range(run.rows.start, run.rows.stop, ROWS_PER_TILE):
            found.append((number, start, first + start - run.rows.start, min(ROWS_PER_TILE, run.rows.stop - start)))
        first += len(run.rows)
    tile_B4 = np.array(found)
    tables_BW, position_B, first_B2 = upload_all(
        cache.keys.device, cache.tables(runs)[tile_B4[:, 0]], tile_B4[:, 1], tile_B4[:, 2:]
    )
    return in_tiles(cache, tables_BW, position_B, first_B2)


def in_tiles(cache: PagedCache, table_BW: Tensor, position_B: Tensor, first_B2: Tensor | None = None) -> Read:
    """Attend with tiles of consecutive rows of a run.

    position_B: the position of each tile's first row. first_B2: its index, and the number of rows. Without them, tile b
    is row b, the only row of its sequence.
    """
    num_keys, head_size = cache.keys.shape[2:]
    num_tiles, width = table_BW.shape
    rows_per_tile = 1 if first_B2 is None else ROWS_PER_TILE

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        rows, heads, _ = q_RHP.shape
        max_keys = min(width * cache.page_size, call.window or math.inf)
        splits = 1 if first_B2 is not None else num_splits(num_tiles * num_keys, max_keys)
        out_RHP = q_RHP.new_empty(q_RHP.shape)
        part, lse = out_RHP, out_RHP
        if splits > 1:
            exact = torch.promote_types(q_RHP.dtype, torch.float32)
            part = q_RHP.new_empty((splits, *q_RHP.shape), dtype=exact)
            lse = q_RHP.new_empty((splits, rows, heads), dtype=exact)
        shared = {"head_size": head_size, "num_splits": splits, "padded": power_of_two(head_size)}
        kernels.attend_pages[(num_tiles, num_keys, splits)](
            *(q_RHP, cache.keys[call.cache], cache.values[call.cache]),
            *(table_BW, position_B if first_B2 is None else first_B2),
            *(position_B, out_RHP, part, lse, call.scale or head_size**-0.5, call.cap, call.window),
            *(position_B.stride(0), width, q_RHP.stride(0), rows),
            page_size=cache.page_size,
            num_keys=num_keys,
            group=heads // num_keys,
            tile=max(MIN_TILE, power_of_two(rows_per_tile * heads // num_keys)),
            num_queries=rows_per_tile,
            block=KEY_BLOCK,
            wide=kernels.wide_of(q_RHP),
            **shared,
        )
        if splits > 1:
            kernels.combine[(rows * heads,)](part, lse, out_RHP, rows * heads, **shared)
        return out_RHP

    return attend


def num_splits(num_programs: int, max_keys: float) -> int:
    """Return a power of two: how many programs share a row's keys."""
    most = min(NUM_PROGRAMS // num_programs, int(max_keys) // MIN_SPLIT_KEYS, MAX_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


class FusedLayers:
    """Runs rows, one per sequence, through blocks."""

    def __init__(self, model: Nvium, cache: PagedCache) -> None:
        with torch.no_grad():
            model.model.pack()
        self._model, self._cache = model, cache
        self._config = model.config
        self._inv_freq = model.model.rotary_emb.inv_freq.to(model.device, torch.float32)

    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor) -> None:
        model, config, states = self._model.model, self._config, self._cache.states_NSD
        calls = [call for block in blocks for call in model.blocks[block]]
        ends = {model.blocks[block][-1].cache: block for block in blocks}
        layers = [cast(Layer, model.layers[call.layer]) for call in calls]
        table = states[blocks.start - 1] if blocks.start else model.embed_tokens.weight
        slot_R = inputs.rows["slot"]
        rows, width, stride = len(slot_R), config.hidden_size, slot_R.stride(0)
        h_RD = states.new_empty(rows, width)
        x_RD = h_RD if config.layer_norms == "after" else torch.empty_like(h_RD)
        exact: dict[str, Any] = {"wide": kernels.wide_of(h_RD), "size": power_of_two(width)}
        sizes = (stride, width, config.rms_norm_eps)
        kernels.start_rows[(rows,)](
            *(table, slot_R, inputs.rows["token"], inputs.rows["source"], previous_R, h_RD, x_RD),
            *(getattr(layers[0].input_layernorm, "weight", None), *sizes, model.embedding_scale),
            is_first=blocks.start == 0,
            **exact,
        )

        def add(delta_RD: Tensor, *norms: nn.Module | None, kept: Tensor | None = None) -> None:
            weights = (getattr(norm, "weight", None) for norm in norms)  # not every layer has every norm
            given = (h_RD, delta_RD, x_RD, *weights, kept, slot_R, *sizes, config.residual_scale)
            kernels.add_rows[(rows,)](*given, **exact)

        attend = self._attend(inputs)
        for call, layer, following in zip(calls, layers, [*layers[1:], None], strict=True):
            attended_RD = layer.self_attn.o_proj(attend(layer.self_attn, call, x_RD))
            add(attended_RD, layer.post_self_attn_layernorm, None, layer.post_attention_layernorm)
            mapped_RD = layer.mlp.down_proj(self._activate(layer.mlp, call, x_RD))
            norms = (layer.post_mlp_layernorm, model.norm if call.is_normed else None)
            kept = states[ends[call.cache]] if call.cache in ends else None
            add(mapped_RD, *norms, following and following.input_layernorm, kept=kept)

    def _attend(self, inputs: InputViews) -> Callable[[Attention, LayerCall, Tensor], Tensor]:
        cache, config, rows = self._cache, self._config, inputs.rows
        num_keys, head_size = cache.keys.shape[2:]
        num_queries = config.num_attention_heads
        size = power_of_two(head_size)
        normed_size = power_of_two(num_queries * head_size) if config.qk_norm_kind == "width" else size
        sizes = {"num_queries": num_queries, "num_keys": num_keys, "head_size": head_size}
        sizes |= {"size": size, "normed_size": normed_size}
        read = in_tiles(cache, inputs.table_RW, rows["position"])

        def attend(module: Attention, call: LayerCall, x_RD: Tensor) -> Tensor:
            assert module.qkv is not None
            qkv_R, table = module.qkv(x_RD), call.rotary or 0
            q_RHP = qkv_R.new_empty(len(x_RD), num_queries, head_size)
            kernels.rotate_and_write[(len(x_RD), num_queries + 2 * num_keys)](
                *(qkv_R, q_RHP, cache.keys[call.cache], cache.values[call.cache], rows["slot"], rows["position"]),
                *(self._inv_freq[table], *(getattr(norm, "weight", None) for norm in (module.q_norm, module.k_norm))),
                *(rows["slot"].stride(0), self._model.model.rotary_emb.scalings[table], config.rms_norm_eps),
                rotated=0 if call.rotary is None else config.rotary_size,
                qk_norm=call.qk_norm,
                wide=kernels.wide_of(x_RD),
                **sizes,
            )
            return read(q_RHP, call).flatten(-2)

        return attend

    def _activate(self, mlp: FeedForward, call: LayerCall, x_RD: Tensor) -> Tensor:
        inner_R = mlp.up_proj(x_RD) if mlp.gate_up is None else mlp.gate_up(x_RD)
        out_RI = inner_R.new_empty(len(x_RD), mlp.up_proj.out_features)
        kinds = {"activation": call.activation, "gated": mlp.gate_up is not None, "wide": kernels.wide_of(x_RD)}
        width = out_RI.shape[1]
        kernels.activate[(len(x_RD), -(-width // 1024))](inner_R, out_RI, width, block=1024, **kinds)
        return out_RI
