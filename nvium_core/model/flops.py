"""Floating-point operations of a token, by formula (paper, breakdown of FLOPs).

A multiplication and an addition are two operations. Norms, rotations and softmaxes are not counted. Knows no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nvium_core.model.config import NviumConfig


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of one token by part: projections and feed-forward layers, attention, heads, adapters, routers."""

    layers: float
    attention: float
    heads: float
    adapters: float
    routers: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, float]:
        return {**vars(self), "total": self.total}


def flops_per_token(config: NviumConfig, num_positions: int) -> Flops:
    """With all exits, as in training and scoring: L(8d² + 6dm) + 4LSd + N·2Vd + N·4d·d_a + (N−1)·4d·m_r, with S =
    `num_positions` attended. Fewer key heads than query heads reduce the 8d²."""
    num_exits = config.num_exits
    return _flops(config, num_positions, num_layers=config.num_hidden_layers, heads=num_exits, routers=num_exits - 1)


def spoken_flops(config: NviumConfig, num_positions: int, exit_shares: Sequence[float]) -> Flops:
    """Operations of a generated token, deferred layers included: every layer, one head with its adapter, and the
    routers of the early exits reached, with p_k = `exit_shares`."""
    num_layers = config.num_hidden_layers
    return _flops(config, num_positions, num_layers=num_layers, heads=1, routers=routers_asked(exit_shares))


def flops_before_speaking(config: NviumConfig, num_positions: int, exit_shares: Sequence[float]) -> Flops:
    """Operations before a token is emitted: those of its generation without its deferred layers."""
    depths = zip(exit_shares, config.exit_layers or [], strict=True)
    num_layers = sum(share * depth for share, depth in depths) / sum(exit_shares)
    return _flops(config, num_positions, num_layers=num_layers, heads=1, routers=routers_asked(exit_shares))


def routers_asked(exit_shares: Sequence[float]) -> float:
    """Σ_{k<N} P(reaching k): routers per token on average."""
    return sum(sum(exit_shares[k:]) for k in range(len(exit_shares) - 1)) / sum(exit_shares)


def _flops(config: NviumConfig, num_positions: int, *, num_layers: float, heads: float, routers: float) -> Flops:
    width, head_dim = config.hidden_size, config.head_dim or config.hidden_size // config.num_attention_heads
    query_width, key_width = config.num_attention_heads * head_dim, (config.num_key_value_heads or 0) * head_dim
    per_layer = 4 * width * (query_width + key_width) + 6 * width * config.intermediate_size
    return Flops(
        layers=num_layers * per_layer,
        attention=num_layers * 4 * num_positions * query_width,
        heads=heads * 2 * config.vocab_size * width,
        adapters=heads * 4 * width * (config.adapter_hidden_size or 0),
        routers=routers * 4 * width * (config.router_hidden_size or 0),
    )
