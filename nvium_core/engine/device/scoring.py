"""Scores of rows that have passed every block: log π_mix and all p_k, exact, whichever exit has emitted.

Shapes: S rows to score, E exits, D width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium

MAX_SCORED_ROWS = 32
"""Rows whose exits' logits, [S, E, V], are held at the same time."""


def scores(
    model: Nvium,
    states_ECD: Tensor,
    slots: Items[int],
    targets: Items[int],
    num_top: Items[int],
    rows_at_once: int,
    is_original: bool = False,
) -> Iterator[Score]:
    """Score a target and `num_top` alternatives in each slot; `is_original`: by the last exit alone."""
    for first in range(0, len(targets), rows_at_once):
        part = slice(first, first + rows_at_once)
        states_ESD = states_ECD[:, torch.tensor(slots[part], device=states_ECD.device)]
        log_w_SE2, outputs = model.exit_outputs(list(states_ESD))
        log_p_SE = mixture.log_exit_probs(log_w_SE2)
        if is_original:
            log_p_SE = torch.full_like(log_p_SE, -torch.inf).index_fill_(-1, last_of(log_p_SE), 0.0)
        exit_logits_SEV = torch.stack([model.lm_head(o_SD) for o_SD in outputs], dim=-2)
        yield from scores_of(
            mixture.log_mixture(log_p_SE, exit_logits_SEV), log_p_SE.exp(), targets[part], num_top[part]
        )


def last_of(x_SE: Tensor) -> Tensor:
    return torch.tensor([x_SE.shape[-1] - 1], device=x_SE.device)


def scores_of(log_SV: Tensor, p_SE: Tensor, targets: Items[int], num_top: Items[int]) -> Iterator[Score]:
    """Scores from log-probabilities of all tokens and p_k of all exits in each row."""
    logprobs = log_SV.gather(-1, torch.tensor(targets, device=log_SV.device)[:, None])[:, 0].tolist()
    top = log_SV.topk(min(max(num_top), log_SV.shape[-1]), dim=-1)
    tops = zip(top.indices.tolist(), top.values.tolist(), num_top, strict=True)
    for logprob, (ids, values, count), p_E in zip(logprobs, tops, p_SE.tolist(), strict=True):
        yield Score(logprob, tuple(zip(ids, values, strict=True))[:count], tuple(p_E))
