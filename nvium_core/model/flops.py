"""FLOPs per token, from the configuration alone (paper, breakdown of FLOPs).

A multiply-add counts as two. Norms, rotary embeddings and softmaxes are not counted.
"""

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


def flops_per_token(config: NviumConfig, num_positions: int) -> Flops:
    """FLOPs of a token that passes all exits and attends to S = `num_positions` positions, as in training and scoring.

    L(8d² + 6dm) + 4LSd + N·2Vd + N·4d·d_a + (N−1)·4d·m_r. Grouped-query attention makes the term 8d² smaller.
    """
    width, head_dim = config.hidden_size, config.head_dim or config.hidden_size // config.num_attention_heads
    query_width, key_width = config.num_attention_heads * head_dim, (config.num_key_value_heads or 0) * head_dim
    per_layer = (
        4 * width * (query_width + key_width) + (6 if config.mlp_gated else 4) * width * config.intermediate_size
    )
    return Flops(
        layers=config.num_calls * per_layer,
        attention=config.num_calls * 4 * num_positions * query_width,
        heads=config.num_exits * 2 * config.vocab_size * width,
        adapters=config.num_exits * 4 * width * (config.adapter_hidden_size or 0),
        routers=(config.num_exits - 1) * 4 * width * (config.router_hidden_size or 0),
    )
