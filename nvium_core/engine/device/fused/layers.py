"""The layers of a pass over few rows, with Triton kernels. `Nvium`'s modules are the reference.

Shapes: R rows, D width, I inner width, H query heads, G key heads, P head size, W pages of a table, B tiles.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from nvium_core.engine.device.attention import RowAttention
from nvium_core.engine.device.fused import kernels
from nvium_core.engine.device.inputs import InputViews
from nvium_core.engine.device.paged_cache import PagedCache, power_of_two
from nvium_core.model.llama import Attention, Layer, RMSNorm
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import LayerCall


class FusedLayers:
    """Runs rows, one per sequence, through blocks."""

    def __init__(self, model: Nvium, cache: PagedCache, attention: RowAttention) -> None:
        with torch.no_grad():
            model.model.pack()
        self._model, self._cache, self._attention = model, cache, attention
        self._config = model.config
        self._inv_freq = model.model.rotary_emb.inv_freq[0].to(model.device, torch.float32)

    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor) -> None:
        model, config, states = self._model.model, self._config, self._cache.states_NSD
        calls = [call for block in blocks for call in model.blocks[block]]
        ends = {model.blocks[block][-1].cache: block for block in blocks}
        first = cast(Layer, model.layers[calls[0].layer])
        table = states[blocks.start - 1] if blocks.start else model.embed_tokens.weight
        slot_R = inputs.rows["slot"]
        rows, width, stride = len(slot_R), config.hidden_size, slot_R.stride(0)
        h_RD, x_RD = (states.new_empty(rows, width) for _ in range(2))
        exact: dict[str, Any] = {"wide": kernels.wide_of(h_RD), "size": power_of_two(width)}
        eps = config.rms_norm_eps
        kernels.start_rows[(rows,)](
            *(table, slot_R, inputs.rows["token"], inputs.rows["source"], previous_R, h_RD, x_RD),
            *(first.input_layernorm.weight, stride, width, eps),
            is_first=blocks.start == 0,
            **exact,
        )
        attend = self._attend(inputs)
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            layer = cast(Layer, model.layers[call.layer])
            attended_RD = layer.self_attn.o_proj(attend(layer.self_attn, call, x_RD))
            delta_RD = layer.post_self_attn_layernorm(attended_RD)
            norm = layer.post_attention_layernorm.weight
            sizes = (states[0], slot_R, stride, width, eps)
            kernels.add_rows[(rows,)](h_RD, delta_RD, x_RD, norm, *sizes, keeps=False, norms=True, **exact)
            delta_RD = layer.post_mlp_layernorm(layer.mlp.down_proj(self._activate(layer, x_RD)))
            if following is not None:
                norm = cast(Layer, model.layers[following.layer]).input_layernorm.weight
            sizes = (states[ends.get(call.cache, 0)], *sizes[1:])
            flags = {"keeps": call.cache in ends, "norms": following is not None}
            kernels.add_rows[(rows,)](h_RD, delta_RD, x_RD, norm, *sizes, **flags, **exact)

    def _attend(self, inputs: InputViews) -> Callable[[Attention, LayerCall, Tensor], Tensor]:
        cache, config, rows = self._cache, self._config, inputs.rows
        num_keys, head_size = cache.keys.shape[2:]
        num_queries, scaling = config.num_attention_heads, self._model.model.rotary_emb.scalings[0]
        read = self._attention(cache, inputs.table_RW, rows["position"])

        def attend(module: Attention, call: LayerCall, x_RD: Tensor) -> Tensor:
            assert module.qkv is not None
            qkv_R = module.qkv(x_RD)
            norms = [each.weight for each in (module.q_norm, module.k_norm) if isinstance(each, RMSNorm)]
            kernels.rotate_and_write[(len(x_RD), num_queries + 2 * num_keys)](
                *(qkv_R, cache.keys[call.cache], cache.values[call.cache]),
                *(rows["slot"], rows["position"], self._inv_freq),
                *(*(norms or (self._inv_freq, self._inv_freq)), rows["slot"].stride(0), scaling, config.rms_norm_eps),
                num_queries=num_queries,
                num_keys=num_keys,
                half=head_size // 2,
                size=power_of_two(head_size // 2),
                rotates=call.rotary is not None,
                norms=bool(norms),
                wide=kernels.wide_of(x_RD),
            )
            return read(qkv_R.unflatten(-1, (-1, head_size))[:, :num_queries], call).flatten(-2)

        return attend

    def _activate(self, layer: Layer, x_RD: Tensor) -> Tensor:
        assert layer.mlp.gate_up is not None
        gate_up = layer.mlp.gate_up(x_RD)
        inner = gate_up.shape[1] // 2
        out_RI = gate_up.new_empty(len(gate_up), inner)
        grid = (len(gate_up), -(-inner // 1024))
        kernels.activate[grid](gate_up, out_RI, inner, wide=kernels.wide_of(gate_up), block=1024)
        return out_RI
