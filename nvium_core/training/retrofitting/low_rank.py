"""Low-rank updates of a backbone (LoRA, Hu et al. 2106.09685): the weight of every projection in its layers is the
source's plus B A α / r.

What is trained is what is stored: the sum is rounded to the precision of the source's weights, and the gradient passes
the rounding as if it were not there. So nothing is left to merge at the end.

Shapes: O outputs, I inputs, r the rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvium_core.model.llama import Llama

SCALE = 2.0
"""α / r."""


class Update(NamedTuple):
    """Of one projection: the source's weight, the updated one [O, I], A [r, I] and B [O, r]."""

    source_OI: Tensor
    weight_OI: Tensor
    a_rI: nn.Parameter
    b_Or: nn.Parameter


class LowRankUpdates(nn.Module):
    """A is drawn from torch's generator as a linear layer's weights are, B is zero: at first nothing is changed."""

    def __init__(self, backbone: Llama, source: Llama, rank: int, stored: torch.dtype) -> None:
        """Of `backbone`, which has the source's weights. Both stay as they are but for the backbone's projections."""
        super().__init__()
        self.stored = stored
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        self._pairs = [
            (other.weight, own.weight)
            for own, other in zip(backbone.layers.modules(), source.layers.modules(), strict=True)
            if isinstance(own, nn.Linear) and isinstance(other, nn.Linear)
        ]
        for source_OI, weight_OI in self._pairs:
            num_outputs, num_inputs = source_OI.shape
            weight_OI.requires_grad_(True)
            self.a.append(nn.Linear(num_inputs, rank, bias=False).weight)
            self.b.append(torch.zeros(num_outputs, rank))

    def updates(self) -> list[Update]:
        return [Update(*pair, a, b) for pair, a, b in zip(self._pairs, self.a, self.b, strict=True)]

    @property
    def are_begun(self) -> bool:
        """Whether any weight is another than the source's."""
        return any(bool(b_Or.any()) for b_Or in self.b)

    @torch.no_grad()
    def merge(self) -> None:
        """Make the backbone's weights what A and B say."""
        for source_OI, weight_OI, a_rI, b_Or in self.updates():
            weight_OI.copy_((source_OI.float() + SCALE * (b_Or @ a_rI)).to(self.stored))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add to those of A and B what the weights' gradients come to, and clear these."""
        for _, weight_OI, a_rI, b_Or in self.updates():
            if weight_OI.grad is not None:
                gradient_OI = SCALE * weight_OI.grad.float()
                a_rI.grad = added(a_rI.grad, b_Or.T @ gradient_OI)
                b_Or.grad = added(b_Or.grad, gradient_OI @ a_rI.T)
                weight_OI.grad = None


def added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other
