"""Scores of rows that have passed every block: log π_mix and all p_k, exact, whichever exit has emitted.

Shapes: S rows to score, E exits, C cache slots, D width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import FrontDecision
from nvium_core.model import mixture
from nvium_core.model.nvium import NviumForCausalLM

MAX_SCORED_ROWS = 32
"""Rows whose exits' logits, [S, E, V], are held at the same time."""


def scores(
    model: NviumForCausalLM,
    states_ECD: Tensor,
    slots: Items[int],
    targets: Items[int],
    num_top: Items[int],
    rows_at_once: int,
) -> Iterator[Score]:
    """Of a target and so many alternatives in each slot."""
    for first in range(0, len(targets), rows_at_once):
        part = slice(first, first + rows_at_once)
        log_p_SE, log_mix_SV = _mixture(model, states_ECD[:, torch.tensor(slots[part], device=states_ECD.device)])
        yield from scores_of(log_mix_SV, log_p_SE.exp(), targets[part], num_top[part])


def scores_of(log_SV: Tensor, p_SE: Tensor, targets: Items[int], num_top: Items[int]) -> Iterator[Score]:
    """From log-probabilities of all tokens and p_k of all exits in each row."""
    logprobs = log_SV.gather(-1, torch.tensor(targets, device=log_SV.device)[:, None])[:, 0].tolist()
    top = log_SV.topk(min(max(num_top), log_SV.shape[-1]), dim=-1)
    tops = zip(top.indices.tolist(), top.values.tolist(), num_top, strict=True)
    for logprob, (ids, values, count), p_E in zip(logprobs, tops, p_SE.tolist(), strict=True):
        yield Score(logprob, tuple(zip(ids, values, strict=True))[:count], tuple(p_E))


def _mixture(model: NviumForCausalLM, states_ESD: Tensor) -> tuple[Tensor, Tensor]:
    """log p_k, [S, E], and log π_mix, [S, V]."""
    log_w_SE2, outputs = model.exit_outputs(list(states_ESD))
    exit_logits_SEV = torch.stack([model.lm_head(o_SD) for o_SD in outputs], dim=-2)
    log_p_SE = mixture.log_exit_probs(log_w_SE2)
    return log_p_SE, mixture.log_mixture(log_p_SE, exit_logits_SEV)


def next_tokens(sequence: Sequence, rows: range, decisions: Mapping[Sequence, FrontDecision]) -> list[int]:
    """The tokens after these rows; the front's is the one it has just emitted, 0 if it could emit none."""
    known = sequence.token_ids[rows.start + 1 : rows.stop + 1]
    return known if len(known) == len(rows) else [*known, max(decisions[sequence].token_id or 0, 0)]
