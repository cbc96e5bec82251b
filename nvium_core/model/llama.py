"""The backbone without exits: Llama, with the optional parts of Qwen, Mistral and SmolLM.

Layers process *rows*: token positions in any arrangement. The caller passes attention as the function `attend`, so
training (packed documents), `generate()` (a Hugging Face cache) and the engine (ragged rows, paged cache) run the same
layers. Parameter names are Hugging Face's.

Shapes: X any row dimensions, D width, H query heads, G key/value heads, P head size, I inner width.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nvium_core.choices import Norms
from nvium_core.model.config import NviumConfig
from nvium_core.model.plan import LayerCall, blocks_of

Attend = Callable[[Tensor, Tensor, Tensor, LayerCall], Tensor]
"""Attention of one call: (queries [X, H, P], keys [X, G, P], values [X, G, P], call) → [X, H, P]."""

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of each row's rotary angles, [X, P] each."""


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

    @classmethod
    def of(cls, *layers: nn.Linear) -> "FusedLinear":
        """Fuse the layers. Their weights become views of the fused weight, so no memory is duplicated."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        given: list[Tensor | None] = [layer.bias for layer in layers]
        biases = [bias.detach() for bias in given if bias is not None]
        for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
            layer.weight = nn.Parameter(part, layer.weight.requires_grad)
        return cls(weight, torch.cat(biases) if biases else None)

    def is_of(self, *layers: nn.Linear) -> bool:
        """Return whether the layers' weights still are views of the fused weight."""
        parts = self.weight.split([layer.out_features for layer in layers])
        return all(
            (layer.weight.data_ptr(), layer.weight.dtype, layer.weight.device)
            == (part.data_ptr(), part.dtype, part.device)
            for layer, part in zip(layers, parts, strict=True)
        )

    def __call__(self, x_XD: Tensor) -> Tensor:
        return F.linear(x_XD, self.weight, self.bias)


def fused(known: FusedLinear | None, *layers: nn.Linear) -> FusedLinear:
    """Fuse the layers. If `known` is still their fusion, return it: CUDA graphs may contain the address of `known`."""
    return known if known is not None and known.is_of(*layers) else FusedLinear.of(*layers)


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
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.qkv: FusedLinear | None = None

    def pack(self) -> None:
        self.qkv = fused(self.qkv, self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x_XD: Tensor, call: LayerCall, rotary: Rotary, attend: Attend) -> Tensor:
        if self.qkv is not None and call.has_rotary and isinstance(self.q_norm, nn.Identity):
            q_XHP, k_XGP, v_XGP = self._rotated_together(self.qkv(x_XD), rotary)
        else:
            q_XHP = self.q_norm(self.q_proj(x_XD).unflatten(-1, (-1, self.head_dim)))
            k_XGP = self.k_norm(self.k_proj(x_XD).unflatten(-1, (-1, self.head_dim)))
            v_XGP = self.v_proj(x_XD).unflatten(-1, (-1, self.head_dim))
            if call.has_rotary:
                q_XHP, k_XGP = rotate(q_XHP, rotary), rotate(k_XGP, rotary)
        return self.o_proj(attend(q_XHP, k_XGP, v_XGP, call).flatten(-2))

    def _rotated_together(self, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        widths = (self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features)
        num_queries, num_keys, num_values = (width // self.head_dim for width in widths)
        qk, v_XGP = qkv.unflatten(-1, (-1, self.head_dim)).split([num_queries + num_keys, num_values], -2)
        q_XHP, k_XGP = rotate(qk, rotary).split([num_queries, num_keys], -2)
        return q_XHP, k_XGP, v_XGP


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.gate_up: FusedLinear | None = None

    def pack(self) -> None:
        self.gate_up = fused(self.gate_up, self.gate_proj, self.up_proj)

    def forward(self, x_XD: Tensor) -> Tensor:
        if self.gate_up is None:
            return self.down_proj(F.silu(self.gate_proj(x_XD)) * self.up_proj(x_XD))
        gate_XI, up_XI = self.gate_up(x_XD).chunk(2, -1)
        return self.down_proj(F.silu(gate_XI) * up_XI)


class Layer(nn.Module):
    """Attention and MLP with a norm before each, and optionally one after each. The names are those of GLM-4."""

    def __init__(self, config: NviumConfig, norms: Norms) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = FeedForward(config)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            RMSNorm(width, eps) if norms == "both" else nn.Identity() for _ in range(2)
        )

    def forward(self, h_XD: Tensor, call: LayerCall, rotary: Rotary, attend: Attend) -> Tensor:
        attended_XD = self.self_attn(self.input_layernorm(h_XD), call, rotary, attend)
        h_XD = h_XD + self.post_self_attn_layernorm(attended_XD)
        return h_XD + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(h_XD)))


class Llama(nn.Module):
    """Embedding, layers and their plan. `norm` follows the calls that the plan marks; other norms belong to exits."""

    _gradient_checkpointing_func: Callable[..., Tensor]

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        embeddings = torch.empty(config.vocab_size, config.hidden_size)
        if not embeddings.is_meta:  # random numbers on meta would import PyTorch's compiler
            nn.init.normal_(embeddings)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=False, padding_idx=config.pad_token_id)
        self.blocks = blocks_of(config)
        norms = {call.layer: call.norms for block in self.blocks for call in block}
        self.layers = nn.ModuleList(Layer(config, norms[index]) for index in range(config.num_hidden_layers))
        is_normed = any(call.is_normed for block in self.blocks for call in block)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if is_normed else None
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False  # set by transformers' `gradient_checkpointing_enable`

    def pack(self) -> None:
        """Fuse projections that share their input, for inference on the current device."""
        for module in self.layers:
            layer = cast(Layer, module)
            layer.self_attn.pack()
            layer.mlp.pack()

    def run(self, h_XD: Tensor, calls: Iterable[LayerCall], rotary: Rotary, attend: Attend) -> Tensor:
        for call in calls:
            layer = self.layers[call.layer]
            if self.gradient_checkpointing and self.training:
                h_XD = self._gradient_checkpointing_func(layer, h_XD, call, rotary, attend)
            else:
                h_XD = layer(h_XD, call, rotary, attend)
            if call.is_normed and self.norm is not None:
                h_XD = self.norm(h_XD)
        return h_XD


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings. Angles are always float32."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.config = config
        frequencies, self.scaling = self.frequencies()
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def frequencies(self) -> tuple[Tensor, float]:
        """Return each pair's radians per position, and the factor of cosines and sines. The tensors are on the CPU."""
        parameters, size = dict(self.config.rope_parameters or {}), self.config.head_dim or 0
        with torch.device("cpu"):
            if parameters["rope_type"] != "default":
                return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config)
            exponents = torch.arange(0, size, 2, dtype=torch.float) / size
            return 1.0 / (parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    def forward(self, positions_X: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cosines and sines for positions of shape X = [B, T] or [R]."""
        angles = positions_X[..., None].float() * self.inv_freq.to(positions_X.device, torch.float)
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scaling).to(dtype), (both.sin() * self.scaling).to(dtype)


def rotate(x_XHP: Tensor, rotary: Rotary) -> Tensor:
    """Apply the rotary position embedding. All heads of a row have the same angles."""
    cos_XP, sin_XP = rotary
    first, second = x_XHP.chunk(2, dim=-1)
    return x_XHP * cos_XP.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin_XP.unsqueeze(-2)


def causal_attention(mask: Tensor | None = None) -> Attend:
    """Return causal attention within the sequences of a batch, X = [B, T].

    mask: [B, 1, T, T], True where position t may attend to position s. It replaces the causal mask.
    """

    def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        q_BHTP, k_BGTP, v_BGTP = (x.transpose(1, 2) for x in (q_BTHP, k_BTGP, v_BTGP))
        seen = within_window(mask, q_BHTP, k_BGTP, call.window)
        return dense_attention(q_BHTP, k_BGTP, v_BGTP, seen, is_causal=seen is None).transpose(1, 2)

    return attend


def document_attention(lengths: Sequence[int]) -> Attend:
    """Return causal attention within each document of a batch X = [B, T], without a mask.

    lengths: the documents' numbers of rows, in order. No document crosses the end of a row of the batch.
    """

    def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        by_document = (x.flatten(0, 1).transpose(0, 1)[None].split(lengths, dim=2) for x in (q_BTHP, k_BTGP, v_BTGP))
        found = []
        for q, k, v in zip(*by_document, strict=True):
            seen = within_window(None, q, k, call.window)
            found.append(dense_attention(q, k, v, seen, is_causal=seen is None))
        return torch.cat(found, dim=2).transpose(1, 2).reshape(q_BTHP.shape)

    return attend


def within_window(mask: Tensor | None, q_BHTP: Tensor, k_BGSP: Tensor, window: int | None) -> Tensor | None:
    """Limit a causal mask to the last `window` positions. The queries are the last T of S positions.

    A mask of None is causal. Return None if no window limits it.
    """
    num_rows, num_keys = q_BHTP.shape[2], k_BGSP.shape[2]
    if window is None or num_keys <= window:
        return mask
    first = num_keys - num_rows
    seen_TS = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q_BHTP.device)
    seen_TS = seen_TS.tril(first).triu(first - window + 1)
    return seen_TS if mask is None else seen_TS & mask


def dense_attention(
    q_BHTP: Tensor, k_BGSP: Tensor, v_BGSP: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """Compute scaled dot-product attention; each of the G key heads serves H / G query heads."""
    grouped = q_BHTP.shape[1] != k_BGSP.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTP, k_BGSP, v_BGSP, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )
