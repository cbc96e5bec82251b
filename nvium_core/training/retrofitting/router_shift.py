"""Shift the log-odds of all routers by one number, so that the mean depth is exactly the requested depth.

Training brings the mean depth only close to the requested depth. The mean depth falls as the shift grows, so a
bisection on some rows finds the shift. Sampling from the shifted mixture is exact, too.

Shapes: R rows, E exits.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.training.data.windows import Windows
from nvium_core.training.retrofitting.model import WithExits

NUM_ROWS = 32_768  # training tokens on which the depth is measured

MAX_SHIFT, NUM_BISECTIONS = 32.0, 48


def shift_to_depth(model: WithExits, stream: Windows, context: int, depth: float) -> float:
    """Shift the routers so that the mean depth on the stream's first rows is `depth`. Return the shift."""
    shift = shift_to(depth, router_log_odds(model, stream, context), model.model.config.exit_layers or [])
    shift_routers(model.early, shift)
    return shift


@torch.no_grad()
def router_log_odds(model: WithExits, stream: Windows, context: int) -> Tensor:
    """Run the routers on the stream's first rows that count towards the loss. Return the log-odds of exiting [R, E]."""
    parts = list[Tensor]()
    for window in range(stream.num_windows(context)):
        if sum(map(len, parts)) >= NUM_ROWS:
            break
        rows = model.rows(stream.batch(window, 1, context))
        parts.append(log_odds(model.route(rows)))
    return torch.cat(parts)


def log_odds(log_w_RE2: Tensor) -> Tensor:
    """Return the log-odds of exiting [R, E]. Those of the last exit are infinite."""
    return log_w_RE2[..., EXIT] - log_w_RE2[..., CONTINUE]


def shifted_log_exit_probs(log_odds_RE: Tensor, shift: float) -> Tensor:
    """Return log p [R, E] after raising the log-odds by `shift`."""
    shifted_RE = log_odds_RE + shift
    return mixture.log_exit_probs(F.logsigmoid(torch.stack([-shifted_RE, shifted_RE], -1)))  # continue, exit


def shift_to(depth: float, log_odds_RE: Tensor, exit_layers: Sequence[int]) -> float:
    """Return the shift at which the rows' mean depth is closest to `depth`."""
    log_odds_RE = log_odds_RE.double()
    low, high = -MAX_SHIFT, MAX_SHIFT
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        too_deep = mixture.mean_depth(shifted_log_exit_probs(log_odds_RE, middle), exit_layers).mean() > depth
        low, high = (middle, high) if too_deep else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def shift_routers(early: Iterable[Exit], shift: float) -> None:
    for exit_ in early:
        assert exit_.router is not None
        exit_.router.head.bias[EXIT] += shift * exit_.router.temperature
