"""FLOPs per token, from the configuration alone (paper, breakdown of FLOPs).

A multiply-add counts as two. Norms, rotary embeddings and softmaxes are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nvium_core.model.config import NviumConfig


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one token by part. `layers` are the projections and feed-forward networks."""

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
    """FLOPs of a token that passes all exits and attends to S = `num_positions` positions, as in training and scoring.

    L(8d² + 6dm) + 4LSd + N·2Vd + N·4d·d_a + (N−1)·4d·m_r. Grouped-query attention makes the term 8d² smaller.
    """
    num_exits = config.num_exits
    return _flops(config, num_positions, num_layers=config.num_calls, heads=num_exits, routers=num_exits - 1)


def generation_flops(config: NviumConfig, num_positions: int, exit_shares: Sequence[float]) -> Flops:
    """FLOPs of a generated token: layers before and after its exit, one head with its adapter, and the routers."""
    num_layers = config.num_calls
    return _flops(config, num_positions, num_layers=num_layers, heads=1, routers=mean_routers(exit_shares))


def flops_until_emitted(config: NviumConfig, num_positions: int, exit_shares: Sequence[float]) -> Flops:
    """FLOPs spent before a token is emitted: `generation_flops` without the layers after its exit."""
    depths = zip(exit_shares, config.exit_layers or [], strict=True)
    num_layers = sum(share * depth for share, depth in depths) / sum(exit_shares)
    return _flops(config, num_positions, num_layers=num_layers, heads=1, routers=mean_routers(exit_shares))


def mean_routers(exit_shares: Sequence[float]) -> float:
    """Mean number of routers evaluated per token: Σ_{k<N} P(reaching exit k)."""
    return sum(sum(exit_shares[k:]) for k in range(len(exit_shares) - 1)) / sum(exit_shares)


def _flops(config: NviumConfig, num_positions: int, *, num_layers: float, heads: float, routers: float) -> Flops:
    width, head_dim = config.hidden_size, config.head_dim or config.hidden_size // config.num_attention_heads
    query_width, key_width = config.num_attention_heads * head_dim, (config.num_key_value_heads or 0) * head_dim
    per_layer = (
        4 * width * (query_width + key_width) + (6 if config.mlp_gated else 4) * width * config.intermediate_size
    )
    return Flops(
        layers=num_layers * per_layer,
        attention=num_layers * 4 * num_positions * query_width,
        heads=heads * 2 * config.vocab_size * width,
        adapters=heads * 4 * width * (config.adapter_hidden_size or 0),
        routers=routers * 4 * width * (config.router_hidden_size or 0),
    )
