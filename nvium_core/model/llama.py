"""The backbone without exits: Llama, with the optional parts of related models (backbones.py).

Layers process *rows*: token positions in any arrangement. The caller passes attention as the function `attend`, so
training (packed documents), `generate()` (a Hugging Face cache) and the engine (ragged rows, paged cache) run the same
layers. Parameter names are Hugging Face's.

Shapes: X any row dimensions, D width, H query heads, G key/value heads, P head size, I inner width.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nvium_core.choices import Activation
from nvium_core.model.config import NviumConfig
from nvium_core.model.plan import LayerCall, blocks_of

Attend = Callable[[Tensor, Tensor, Tensor, LayerCall], Tensor]
"""Attention of one call: (queries [X, H, P], keys [X, G, P], values [X, G, P], call) → [X, H, P]."""

Rotary = Sequence[tuple[Tensor, Tensor]]
"""For each table: cosine and sine of each row's rotary angles, [X, R] each, for the first R elements of a head."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x_XI: F.relu(x_XI).square(),
}


class RMSNorm(nn.Module):
    """Root mean square normalisation, in float32 or better. On a GPU it is one fused kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_XD: Tensor) -> Tensor:
        if x_XD.device.type != "cpu" and x_XD.dtype == self.weight.dtype:
            return F.rms_norm(x_XD, self.weight.shape, self.weight, self.eps)
        precise = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (precise * scale).to(x_XD.dtype)


class FusedLinear(NamedTuple):
    """Several linear layers with the same input, as one matrix product."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_XD: Tensor) -> Tensor:
        return F.linear(x_XD, self.weight, self.bias)


def fused(known: FusedLinear | None, *layers: nn.Linear) -> FusedLinear:
    """Fuse the layers. Their weights become views of the fused weight, so no memory is duplicated.

    If `known` is still their fusion, return it: CUDA graphs may contain the address of `known`.
    """

    def place(weight: Tensor) -> tuple[object, ...]:
        return weight.data_ptr(), weight.dtype, weight.device

    sizes = [layer.out_features for layer in layers]
    if known and all(
        place(layer.weight) == place(x) for layer, x in zip(layers, known.weight.split(sizes), strict=True)
    ):
        return known
    weight = torch.cat([layer.weight.detach() for layer in layers])
    given: list[Tensor | None] = [layer.bias for layer in layers]
    biases = [bias.detach() for bias in given if bias is not None]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight = nn.Parameter(part, layer.weight.requires_grad)
    return FusedLinear(weight, torch.cat(biases) if biases else None)


class Attention(nn.Module):
    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        query_width = config.num_attention_heads * self.head_dim
        key_width = (config.num_key_value_heads or config.num_attention_heads) * self.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)
        is_wide = config.qk_norm_kind == "width"
        self.q_norm, self.k_norm = (
            RMSNorm(width if is_wide else self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
            for width in (query_width, key_width)
        )
        self.qkv: FusedLinear | None = None

    def pack(self) -> None:
        self.qkv = fused(self.qkv, self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x_XD: Tensor, call: LayerCall, rotary: Rotary, attend: Attend) -> Tensor:
        if self.qkv is not None and call.rotary is not None and call.qk_norm is None:
            q_XHP, k_XGP, v_XGP = self._rotated_together(self.qkv(x_XD), rotary[call.rotary])
        else:
            q_XHP = self._finished(self.q_proj(x_XD), self.q_norm, call, rotary)
            k_XGP = self._finished(self.k_proj(x_XD), self.k_norm, call, rotary)
            v_XGP = self.v_proj(x_XD).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(q_XHP, k_XGP, v_XGP, call).flatten(-2))

    def _finished(self, x_X: Tensor, norm: nn.Module, call: LayerCall, rotary: Rotary) -> Tensor:
        """Split queries or keys into heads, normalise and rotate them."""
        x_XHP = (norm(x_X) if call.qk_norm == "width" else x_X).unflatten(-1, (-1, self.head_dim))
        if call.qk_norm == "head":
            x_XHP = norm(x_XHP)
        if call.rotary is not None:
            x_XHP = rotate(x_XHP, rotary[call.rotary])
        return norm(x_XHP) if call.qk_norm == "rotated head" else x_XHP

    def _rotated_together(self, qkv: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        widths = (self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features)
        num_queries, num_keys, num_values = (width // self.head_dim for width in widths)
        qk, v_XGP = qkv.unflatten(-1, (-1, self.head_dim)).split([num_queries + num_keys, num_values], -2)
        q_XHP, k_XGP = rotate(qk, rotary).split([num_queries, num_keys], -2)
        return q_XHP, k_XGP, v_XGP


class FeedForward(nn.Module):
    """down(f(gate(x)) · up(x)) with the activation f, or down(f(up(x))) without a gate."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias) if config.mlp_gated else None
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.gate_up: FusedLinear | None = None

    def pack(self) -> None:
        if self.gate_proj is not None:
            self.gate_up = fused(self.gate_up, self.gate_proj, self.up_proj)

    def forward(self, x_XD: Tensor, activation: Activation) -> Tensor:
        f = ACTIVATIONS[activation]
        if self.gate_proj is None:
            return self.down_proj(f(self.up_proj(x_XD)))
        if self.gate_up is None:
            return self.down_proj(f(self.gate_proj(x_XD)) * self.up_proj(x_XD))
        gate_XI, up_XI = self.gate_up(x_XD).chunk(2, -1)
        return self.down_proj(f(gate_XI) * up_XI)


class Layer(nn.Module):
    """Attention and MLP with a norm before or after each, or both. The names are those of GLM-4."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()

        def norm(exists: bool) -> nn.Module:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if exists else nn.Identity()

        is_before, is_after = config.layer_norms != "after", config.layer_norms != "before"
        self.input_layernorm = norm(is_before)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm(is_before)
        self.mlp = FeedForward(config)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = norm(is_after), norm(is_after)
        self.residual_scale = config.residual_scale

    def forward(self, h_XD: Tensor, call: LayerCall, rotary: Rotary, attend: Attend) -> Tensor:
        attended_XD = self.self_attn(self.input_layernorm(h_XD), call, rotary, attend)
        h_XD = h_XD.add(self.post_self_attn_layernorm(attended_XD), alpha=self.residual_scale)
        mapped_XD = self.mlp(self.post_attention_layernorm(h_XD), call.activation)
        return h_XD.add(self.post_mlp_layernorm(mapped_XD), alpha=self.residual_scale)


class Llama(nn.Module):
    """Embedding, layers and their plan. `norm` follows the calls that the plan marks; other norms belong to exits."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        embeddings = torch.empty(config.vocab_size, config.hidden_size)
        if not embeddings.is_meta:  # random numbers on meta would import PyTorch's compiler
            nn.init.normal_(embeddings)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=False, padding_idx=config.pad_token_id)
        self.blocks = blocks_of(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        is_normed = any(call.is_normed for block in self.blocks for call in block)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if is_normed else None
        self.rotary_emb = RotaryEmbedding(config)
        self.embedding_scale = config.embedding_scale

    def embed(self, token_ids_X: Tensor) -> Tensor:
        h_XD: Tensor = self.embed_tokens(token_ids_X)
        return h_XD if self.embedding_scale == 1 else h_XD * self.embedding_scale

    def pack(self) -> None:
        """Fuse projections that share their input, for inference on the current device."""
        for module in self.layers:
            layer = cast(Layer, module)
            layer.self_attn.pack()
            layer.mlp.pack()

    def run(self, h_XD: Tensor, calls: Iterable[LayerCall], rotary: Rotary, attend: Attend) -> Tensor:
        for call in calls:
            h_XD = self.layers[call.layer](h_XD, call, rotary, attend)
            if call.is_normed and self.norm is not None:
                h_XD = self.norm(h_XD)
        return h_XD


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings: one table, or a second one for layers with a window. Angles are always float32."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.config = config
        frequencies, self.scalings = self.frequencies()
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def frequencies(self) -> tuple[Tensor, list[float]]:
        """Return each pair's radians per position [tables, pairs], and the factors of cosines and sines, on the CPU."""
        kinds = [self.config.rope_parameters, self.config.window_rope_parameters]
        tables = [rotary_table(self.config, dict(kind)) for kind in kinds if kind]
        return torch.stack([frequencies for frequencies, _ in tables]), [scaling for _, scaling in tables]

    @torch.no_grad()
    def forward(self, positions_X: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cosines and sines for positions of shape X = [B, T] or [R]."""
        made = []
        for frequencies, scaling in zip(self.inv_freq.to(positions_X.device, torch.float), self.scalings, strict=True):
            angles = positions_X[..., None].float() * frequencies
            both = torch.cat((angles, angles), dim=-1)
            made.append(((both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)))
        return made


def rotary_table(config: NviumConfig, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Return each pair's radians per position, and the factor of cosines and sines."""
    with torch.device("cpu"):
        if parameters["rope_type"] != "default":
            config = copy(config)
            config.rope_parameters = parameters
            return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float) / config.rotary_size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


def rotate(x_XHP: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first elements of each head, as many as there are angles. All heads of a row have the same angles."""
    cos_XR, sin_XR = rotary
    x_XHR, rest = x_XHP.split([cos_XR.shape[-1], x_XHP.shape[-1] - cos_XR.shape[-1]], dim=-1)
    first, second = x_XHR.chunk(2, dim=-1)
    rotated = x_XHR * cos_XR.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin_XR.unsqueeze(-2)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def causal_attention(mask: Tensor | None = None, update: Callable[..., tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Return causal attention within the sequences of a batch, X = [B, T].

    mask: [B, 1, T, S], True where position t may attend to position s. It replaces the causal mask.
    update: (new keys, new values, index in the cache) → all keys and values; None: the new ones are all.
    """

    def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        q_BHTP, k_BGSP, v_BGSP = (x.transpose(1, 2) for x in (q_BTHP, k_BTGP, v_BTGP))
        if update is not None:
            k_BGSP, v_BGSP = update(k_BGSP, v_BGSP, call.cache)
        return windowed_attention(q_BHTP, k_BGSP, v_BGSP, call, mask).transpose(1, 2)

    return attend


def document_attention(lengths: Sequence[int]) -> Attend:
    """Return causal attention within each document of a batch X = [B, T], without a mask.

    lengths: the documents' numbers of rows, in order. No document crosses the end of a row of the batch.
    """

    def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        by_document = (x.flatten(0, 1).transpose(0, 1)[None].split(lengths, dim=2) for x in (q_BTHP, k_BTGP, v_BTGP))
        found = [windowed_attention(q, k, v, call, None) for q, k, v in zip(*by_document, strict=True)]
        return torch.cat(found, dim=2).transpose(1, 2).reshape(q_BTHP.shape)

    return attend


def windowed_attention(q_BHTP: Tensor, k_BGSP: Tensor, v_BGSP: Tensor, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Compute causal attention within the call's window. The queries are the last T of S positions.

    mask: [B, 1, T, S], True where a query may attend to a key, without the window; None is causal.
    """
    num_rows, num_keys = q_BHTP.shape[2], k_BGSP.shape[2]
    is_limited = call.window is not None and num_keys > call.window
    if is_limited or (mask is None and 1 < num_rows < num_keys):
        causal_TS = causal_mask(num_rows, num_keys, call.window, q_BHTP.device)
        mask = causal_TS if mask is None else mask & causal_TS
    return dense_attention(q_BHTP, k_BGSP, v_BGSP, call, mask)


def causal_mask(num_rows: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return where the last T of S positions may attend, [T, S]: to themselves and all before, or the last `window`."""
    first = num_keys - num_rows
    mask_TS = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(first)
    return mask_TS if window is None else mask_TS.triu(first - window + 1)


def dense_attention(q_BHTP: Tensor, k_BGSP: Tensor, v_BGSP: Tensor, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Compute scaled dot-product attention; each of the G key heads serves H / G query heads.

    mask: broadcasts to [B, H, T, S], True where a query may attend to a key. None is causal if T = S, and all if T = 1.
    """
    num_rows, num_heads, grouped = q_BHTP.shape[2], q_BHTP.shape[1], q_BHTP.shape[1] != k_BGSP.shape[1]
    if call.cap is None:
        is_causal = mask is None and num_rows > 1
        return F.scaled_dot_product_attention(
            q_BHTP, k_BGSP, v_BGSP, attn_mask=mask, is_causal=is_causal, scale=call.scale, enable_gqa=grouped
        )
    k_BHSP, v_BHSP = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (k_BGSP, v_BGSP))
    scores = q_BHTP @ k_BHSP.transpose(2, 3) * (call.scale or q_BHTP.shape[-1] ** -0.5)
    capped = (scores / call.cap).tanh() * call.cap
    seen = causal_mask(num_rows, k_BGSP.shape[2], None, q_BHTP.device) if mask is None else mask
    least = torch.finfo(capped.dtype).min  # not −∞, because a padded query may attend to nothing
    return capped.masked_fill(~seen, least).softmax(-1) @ v_BHSP
