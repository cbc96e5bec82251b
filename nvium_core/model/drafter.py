"""A drafter: what the last exit will probably say next, from its row for the last token and the token that it said.

As in Hydra (2402.05109): the next token's row is foreseen without any layer. Nothing of the mixture knows of it.

Shapes: X any row dimensions, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvium_core.model.config import NviumConfig
from nvium_core.model.llama import RMSNorm


class Drafter(nn.Module):
    """x′ = down(SiLU(up([x; norm(e)]))): from the last exit's normed row x of a token and the embedding e of the token
    behind it to that token's own normed row, about."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.drafter_hidden_size
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.up = nn.Linear(2 * width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        foreseen_XD: Tensor = self.down(F.silu(self.up(self.inputs(x_XD, embedding_XD))))
        return foreseen_XD

    def inputs(self, x_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        """[X, 2 D]."""
        dtype = self.up.weight.dtype
        return torch.cat([x_XD.to(dtype), self.norm(embedding_XD.to(dtype))], -1)
