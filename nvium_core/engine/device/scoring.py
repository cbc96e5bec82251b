"""Scores of rows that have passed every block: log π_mix of the next token, and p_k of all exits.

Shapes: S rows to score, E exits, D width, V vocabulary, K alternatives.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.paged_cache import upload_all
from nvium_core.engine.events import Score
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium

MAX_DISTRIBUTIONS = 256  # rows times exits per batch, which bounds the memory of the logits [S, E, V]


class ScoredRow(NamedTuple):
    """A row's cache slot, its next token, and the number of alternatives. `is_original`: only the last exit counts."""

    slot: int
    target: int
    num_top: int
    is_original: bool


def scores(model: Nvium, states_ECD: Tensor, rows: Items[ScoredRow]) -> Iterator[Score]:
    """Yield the scores of rows of any sequences. Each batch is one pass through the exits and one copy to the host."""
    size = max(1, MAX_DISTRIBUTIONS // len(states_ECD))
    for first in range(0, len(rows), size):
        yield from batch_scores(model, states_ECD, rows[first : first + size])


def batch_scores(model: Nvium, states_ECD: Tensor, rows: Items[ScoredRow]) -> Iterator[Score]:
    slots, targets, nums_top, are_original = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    slot_S, target_S, is_original_S = upload_all(states_ECD.device, slots, targets, are_original)
    log_w_SE2, outputs = model.exit_outputs(list(states_ECD[:, slot_S]))
    log_p_SE = mixture.log_exit_probs(log_w_SE2)
    last_alone_SE = torch.full_like(log_p_SE, -torch.inf).index_fill(1, slot_S.new_tensor([len(outputs) - 1]), 0)
    log_p_SE = torch.where(is_original_S[:, None] > 0, last_alone_SE, log_p_SE)
    log_SV = mixture.log_mixture(log_p_SE, torch.stack([model.lm_head(o_SD) for o_SD in outputs], dim=-2))
    top = log_SV.topk(min(int(nums_top.max()), log_SV.shape[-1]), dim=-1)
    own = log_SV.gather(-1, target_S[:, None]), log_p_SE.exp(), top.values, top.indices
    found = torch.cat([part.double() for part in own], dim=-1)  # ids are exact in float64
    for num_top, numbers in zip(nums_top, found.tolist(), strict=True):
        yield score_of(numbers, len(outputs), num_top)


def score_of(numbers: Items[float], num_exits: int, num_top: int) -> Score:
    """Return the score in these numbers: log-probability, p_k of all exits, then the alternatives' values and ids."""
    p, top = numbers[1 : 1 + num_exits], numbers[1 + num_exits :]
    values, ids = top[: len(top) // 2][:num_top], top[len(top) // 2 :][:num_top]
    return Score(numbers[0], tuple(zip(map(int, ids), values, strict=True)), tuple(p))
