"""Scores of rows: the log-probability of the next token before f, and p_k of all exits.

Shapes: S rows to score, E exits, D width, V vocabulary, K alternatives.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nvium_core.engine.device.paged_cache import upload_all
from nvium_core.engine.draw import Draw, ExitRule
from nvium_core.engine.events import Score
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium

NOT_EMITTED = -1

MAX_DISTRIBUTIONS = 256  # rows times exits per batch, which bounds the memory of the logits [S, E, V]


class ScoredRow(NamedTuple):
    """A row's cache slot, its next token, its rule and the number of alternatives.

    `exit`: the exit that emitted the token, or `NOT_EMITTED` if the rule has yet to choose it.
    """

    slot: int
    target: int
    exit: int
    draw: Draw
    num_top: int


def scores(model: Nvium, states_ECD: Tensor, rows: Items[ScoredRow]) -> Iterator[Score]:
    """Yield the scores of rows of any sequences. Each batch is one pass through the exits and one copy to the host."""
    size = max(1, MAX_DISTRIBUTIONS // len(states_ECD))
    for first in range(0, len(rows), size):
        yield from batch_scores(model, states_ECD, rows[first : first + size])


def batch_scores(model: Nvium, states_ECD: Tensor, rows: Items[ScoredRow]) -> Iterator[Score]:
    slots, targets, exits, draws, nums_top = zip(*rows, strict=True)
    rules = np.array([draw.rule for draw in draws])
    columns = np.array([slots, targets, exits, rules])
    slot_S, target_S, exit_S, rule_S = upload_all(states_ECD.device, columns)[0]
    threshold_S = torch.tensor([draw.threshold for draw in draws], dtype=torch.float64, device=slot_S.device)
    log_w_SE2, outputs = model.exit_outputs(list(states_ECD[:, slot_S]))
    log_p_SE = mixture.log_exit_probs(log_w_SE2)
    log_SEV = torch.stack([model.lm_head(o_SD) for o_SD in outputs], dim=-2).to(log_p_SE.dtype).log_softmax(-1)
    exit_S = torch.where(exit_S < 0, mixture.threshold_exit(mixture.log_remaining(log_w_SE2), threshold_S), exit_S)
    of_exit_SV = log_SEV[torch.arange(len(rows), device=exit_S.device), exit_S]
    is_original_S1, is_mixed_S1 = (rule_S == ExitRule.ORIGINAL)[:, None], (rule_S < ExitRule.ORIGINAL)[:, None]
    log_SV = torch.where(is_mixed_S1, (log_p_SE[..., None] + log_SEV).logsumexp(-2), of_exit_SV)
    p_SE = torch.where(is_original_S1, one_hot(exit_S, len(outputs)), log_p_SE.exp())
    top = log_SV.topk(min(max(nums_top), log_SV.shape[-1]), dim=-1)
    own = log_SV.gather(-1, target_S[:, None]), p_SE, top.values, top.indices
    found = torch.cat([part.double() for part in own], dim=-1)  # ids are exact in float64
    for num_top, numbers in zip(nums_top, found.tolist(), strict=True):
        yield score_of(numbers, len(outputs), num_top)


def score_of(numbers: Items[float], num_exits: int, num_top: int) -> Score:
    """Return the score in these numbers: log-probability, p_k of all exits, then the alternatives' values and ids."""
    p, top = numbers[1 : 1 + num_exits], numbers[1 + num_exits :]
    values, ids = top[: len(top) // 2][:num_top], top[len(top) // 2 :][:num_top]
    return Score(numbers[0], tuple(zip(map(int, ids), values, strict=True)), tuple(p))
