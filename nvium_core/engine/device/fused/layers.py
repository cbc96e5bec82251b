"""The layers of a pass over few rows, with Triton kernels. `Nvium`'s modules are the reference.

Shapes: R rows, D width, I inner width, H query heads, G key heads, P head size, W pages of a table, B tiles.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from nvium_core.engine.device.fused import kernels
from nvium_core.engine.device.fused.attention import in_tiles
from nvium_core.engine.device.inputs import InputViews
from nvium_core.engine.device.paged_cache import PagedCache, power_of_two
from nvium_core.model.llama import Attention, FeedForward, Layer
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import LayerCall


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
