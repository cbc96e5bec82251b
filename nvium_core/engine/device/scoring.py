"""Scores of rows that have passed every block: log π_mix of the next token, and p_k of all exits.

Shapes: S rows to score, E exits, D width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium

MAX_SCORED_ROWS = 32  # per batch, which bounds the memory of the logits [S, E, V]


def scores(
    model: Nvium,
    states_ECD: Tensor,
    slots: Items[int],
    targets: Items[int],
    num_top: int,
    *,
    is_original: bool = False,
) -> Iterator[Score]:
    """Yield the scores of rows. `slots`: their cache slots. `targets`: their next tokens.

    `is_original`: score with the last exit alone.
    """
    for first in range(0, len(targets), MAX_SCORED_ROWS):
        part = slice(first, first + MAX_SCORED_ROWS)
        states_ESD = states_ECD[:, torch.tensor(slots[part], device=states_ECD.device)]
        log_w_SE2, outputs = model.exit_outputs(list(states_ESD))
        log_p_SE = mixture.log_exit_probs(log_w_SE2)
        if is_original:
            log_p_SE = torch.full_like(log_p_SE, -torch.inf)
            log_p_SE[:, -1] = 0
        exit_logits_SEV = torch.stack([model.lm_head(o_SD) for o_SD in outputs], dim=-2)
        log_SV = mixture.log_mixture(log_p_SE, exit_logits_SEV)
        target_S1 = torch.tensor(targets[part], device=log_SV.device)[:, None]
        top = log_SV.topk(min(num_top, log_SV.shape[-1]), dim=-1)
        found = (log_SV.gather(-1, target_S1)[:, 0], top.indices, top.values, log_p_SE.exp())
        for logprob, ids, values, p_E in zip(*(x.tolist() for x in found), strict=True):
            yield Score(logprob, tuple(zip(ids, values, strict=True)), tuple(p_E))
