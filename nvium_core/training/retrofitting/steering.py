"""The depth that was asked for, met: one number is added to what every router says for leaving.

Training steers routers towards a depth and ends near it. Mean depth falls as the number rises, so that a bisection
finds it, over what routers have said of rows once. With shifted routers the mixture is as exact as before.

Shapes: R rows, K early exits, E exits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.windows import Windows
from nvium_core.training.retrofitting.model import WithExits

NUM_ROWS = 32_768
"""Tokens of the training text that are measured."""

LARGEST_SHIFT, HALVINGS = 32.0, 48


def steer(model: WithExits, stream: Windows, context: int, depth: float) -> float:
    """Shift the model's routers so that its mean depth on the stream's rows is the asked one. The shift."""
    shift = shift_to(depth, learnt_log_odds(model, stream, context), model.model.config.exit_layers or [])
    shift_routers(model.early, shift)
    return shift


@torch.no_grad()
def learnt_log_odds(model: WithExits, stream: Windows, context: int) -> Tensor:
    """[R, K], of the stream's first rows that count."""
    parts = list[Tensor]()
    for window in range(stream.num_windows(context)):
        if sum(map(len, parts)) >= NUM_ROWS:
            break
        rows = model.rows(stream.batch(window, 1, context))
        pairs = zip(model.early, rows.early, strict=True)
        parts.append(log_odds(torch.stack([exit_.route(x_RD) for exit_, x_RD in pairs], 1)))
    return torch.cat(parts)


def log_odds(log_w_RK2: Tensor) -> Tensor:
    """Log-odds of leaving, [R, K]."""
    return log_w_RK2[..., EXIT] - log_w_RK2[..., CONTINUE]


def shifted_log_exit_probs(log_odds_RK: Tensor, shift: float) -> Tensor:
    """log p [R, E] of routers whose log-odds are so much higher."""
    shifted_RK = log_odds_RK + shift
    log_w_RE2 = shifted_RK.new_zeros(len(shifted_RK), shifted_RK.shape[1] + 1, 2)
    log_w_RE2[:, :-1, EXIT], log_w_RE2[:, :-1, CONTINUE] = F.logsigmoid(shifted_RK), F.logsigmoid(-shifted_RK)
    log_w_RE2[:, -1, CONTINUE] = -torch.inf
    return mixture.log_exit_probs(log_w_RE2)


def shift_to(depth: float, log_odds_RK: Tensor, exit_layers: Sequence[int]) -> float:
    """The shift with which the rows' mean depth is the asked one, or comes nearest."""
    log_odds_RK = log_odds_RK.double()
    low, high = -LARGEST_SHIFT, LARGEST_SHIFT
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_deep = mixture.mean_depth(shifted_log_exit_probs(log_odds_RK, middle), exit_layers).mean() > depth
        low, high = (middle, high) if too_deep else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def shift_routers(early: Iterable[Exit], shift: float) -> None:
    """Add to their log-odds of leaving."""
    for exit_ in early:
        assert exit_.router is not None
        exit_.router.head.bias[EXIT] += shift * exit_.router.temperature


@contextmanager
def shifted(model: Nvium, shift: float) -> Iterator[None]:
    """The model with shifted routers, for as long."""
    early = [exit_ for exit_ in model.exits[:-1] if isinstance(exit_, Exit)]
    biases = [exit_.get_parameter("router.head.bias") for exit_ in early]
    before = [bias.detach().clone() for bias in biases]
    shift_routers(early, shift)
    try:
        yield
    finally:
        for bias, kept in zip(biases, before, strict=True):
            bias.data.copy_(kept)
