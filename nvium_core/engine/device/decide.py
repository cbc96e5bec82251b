"""Decides after each block whether a front row emits a token, by its `ExitRule`. The reference for native/decide.h.
Scores rows: the log-probability of the next token before f, and p_k of all exits.

CUDA graphs can capture the decisions, because the host reads no value, and all inputs are known before the call:
uniforms depend on positions, logit changes depend on earlier tokens, and the cache has the states of earlier exits.
There PyTorch compiles `route` and `emit`: see graphs/capture.py.

Shapes: F fronts with padding, D width, V vocabulary, C changed logits, M mask words, S rows to score, E exits.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nvium_core.engine.device.inputs import InputViews, Variant
from nvium_core.engine.device.paged_cache import upload_all
from nvium_core.engine.device.sampling import certified_argmax, draw, race
from nvium_core.engine.events import Score
from nvium_core.engine.sampling_params import Draw, ExitRule
from nvium_core.engine.schedule.step import NO_TOKEN
from nvium_core.model import mixture
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import Nvium

GOES_ON = NO_TOKEN - 1  # token value of a front row that continues to the next block

NUM_ANSWERS = 4
EXIT_TAKEN, EMITTED, LOG_P, LOG_CONTINUE = range(NUM_ANSWERS)
"""Rows of the float64 result: the exit taken, or -1; the token, `NO_TOKEN` or `GOES_ON`; log p_k of the exit taken;
log Π (1 − w_j) over all exits that the row has passed."""

NOT_EMITTED = -1


class Chosen(NamedTuple):
    """The exits of front rows, and what their draws need.

    `answers` has `GOES_ON` for tokens. `is_sane` is False for NaN at the exit. `o` is the head's input at the exit.
    `mixed`: the mixture [F, V] and its argmax [F], if `Variant.mixes`.
    """

    answers_F4: Tensor
    is_sane_F: Tensor
    uniform_F: Tensor
    o_FD: Tensor
    mixed: tuple[Tensor, ...]


def decide(model: Nvium, states_NSD: Tensor, blocks: range, inputs: InputViews, variant: Variant) -> Tensor:
    """Decide for front rows that have just passed these blocks. Return [4, F]: `EXIT_TAKEN` to `LOG_CONTINUE`."""
    return emit(model, route(model, states_NSD, blocks, inputs, variant), inputs, variant)


def route(model: Nvium, states_NSD: Tensor, blocks: range, inputs: InputViews, variant: Variant) -> Chosen:
    """Choose the exits. No token is drawn yet, so only mixtures read the head."""
    rows = inputs.rows
    rule_F, first_F, uniform_F2N = rows["rule"], rows["first"], rows["uniform"]
    is_exits_F, is_argmax_F, _, is_original_F, is_threshold_F, is_confidence_F = rules_of(inputs)
    states_NFD = states_NSD[: blocks.stop, rows["front_slot"]]
    change = change_of(inputs, variant, model.config.vocab_size)
    log_continue_F = rows["log_reached"]
    log_mixed_F = log_p_F = uniform_F = torch.zeros_like(log_continue_F)
    mixture_FV = torch.zeros_like(log_p_F)[:, None]
    is_open_F = rule_F >= 0
    is_sane_F, o_FD = is_open_F, torch.zeros_like(states_NFD[0])
    exit_F, argmax_F = torch.full_like(rule_F, -1), torch.full_like(rule_F, GOES_ON)
    for block in range(0 if variant.mixes else blocks.start, blocks.stop):
        log_w_F2, own_FD = cast(Exit, model.exits[block])(states_NFD[block])
        log_w_exit_F, log_w_continue_F = log_w_F2[:, EXIT].double(), log_w_F2[:, CONTINUE].double()
        if variant.mixes:
            p_F1 = (log_mixed_F + log_w_exit_F).exp()[:, None]
            logits_FV = model.lm_head(own_FD).double()  # of π, or of g(π) for the argmax
            own_FV = torch.where(is_argmax_F[:, None], change(logits_FV.clone()), logits_FV).softmax(-1)
            mixture_FV = mixture_FV + p_F1 * own_FV
            log_mixed_F = log_mixed_F + log_w_continue_F
        if block not in blocks:
            continue
        is_here_F = is_open_F & (first_F <= block)
        passed_F = log_continue_F + log_w_continue_F
        is_drawn_F = rows["uniform"][:, 1, block] < log_w_exit_F.exp()
        is_reached_F = is_threshold_F & (-passed_F.expm1() >= rows["threshold"])
        takes_F = torch.where(is_exits_F, is_drawn_F, is_reached_F)
        if block == model.config.num_exits - 1:
            takes_F = takes_F | ~is_exits_F
        if variant.mixes:
            most_probable_F, is_certain_F = certified_argmax(mixture_FV, log_mixed_F.exp())
            is_confident_F = is_confidence_F & (own_FV.amax(-1) > rows["threshold"])
            takes_F = takes_F | (is_argmax_F & is_certain_F) | is_confident_F
            argmax_F = torch.where(is_open_F, most_probable_F, argmax_F)
        is_finite_F = ~(log_w_exit_F + log_w_continue_F).isnan()
        takes_F = (takes_F | (~is_finite_F & ~is_original_F)) & is_here_F
        is_sane_F = torch.where(takes_F, is_finite_F, is_sane_F)
        o_FD = torch.where(takes_F[:, None], own_FD, o_FD)
        exit_F = torch.where(takes_F, block, exit_F)
        uniform_F = torch.where(takes_F, uniform_F2N[:, 0, block], uniform_F)
        log_p_F = torch.where(takes_F & ~is_original_F, log_continue_F + log_w_exit_F, log_p_F)
        log_continue_F = torch.where(is_here_F, passed_F, log_continue_F)
        is_open_F = is_open_F & ~takes_F
    answers_F4 = torch.stack([exit_F.double(), torch.full_like(log_p_F, GOES_ON), log_p_F, log_continue_F], dim=1)
    return Chosen(answers_F4, is_sane_F, uniform_F, o_FD, (mixture_FV, argmax_F) if variant.mixes else ())


def emit(model: Nvium, chosen: Chosen, inputs: InputViews, variant: Variant) -> Tensor:
    """Draw the tokens of the front rows that take an exit. Return `decide`'s answers."""
    answers_F4, is_sane_F, uniform_F, o_FD, mixed = chosen
    rows, change = inputs.rows, change_of(inputs, variant, model.config.vocab_size)
    _, is_argmax_F, is_mixture_F, is_original_F, *_ = rules_of(inputs)
    logits_FV = model.lm_head(o_FD)
    logits_FV = logits_FV.to(torch.promote_types(logits_FV.dtype, torch.float32))
    if variant.mixes:
        logits_FV = torch.where(is_mixture_F[:, None], mixed[0].log(), logits_FV)
    logits_FV = change(logits_FV)
    token_F = draw(logits_FV, rows, uniform_F, is_ranked=variant.is_ranked)
    if variant.has_original:
        winner_F = race(logits_FV, rows, uniform_F, is_ranked=variant.is_ranked)
        token_F = torch.where(is_original_F, winner_F, token_F)
    if variant.mixes:
        token_F = torch.where(is_argmax_F, mixed[1], token_F)
    token_F = torch.where(is_sane_F, token_F, NO_TOKEN).where(answers_F4[:, EXIT_TAKEN] >= 0, GOES_ON)
    return torch.stack([answers_F4[:, EXIT_TAKEN], token_F.double(), *answers_F4.T[LOG_P:]])


def rules_of(inputs: InputViews) -> list[Tensor]:
    """Return for each `ExitRule` which fronts have it, [F] each."""
    return [inputs.rows["rule"] == rule.value for rule in ExitRule]  # the compiler does not compare with enums


def change_of(inputs: InputViews, variant: Variant, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Return the function g. It applies `LogitChanges` and the constraints' masks to logits in place."""

    def change(logits_FV: Tensor) -> Tensor:
        if variant.num_changes:
            place_C = torch.arange(variant.num_changes, device=logits_FV.device)
            place_C = place_C.where(place_C < inputs.used[0], 0)  # entry 0 stands in for those that are not in use
            front_C, token_C = inputs.entries_C5[place_C, :2].T
            repetition_C, occurrence_C, bias_C = inputs.values_C5[place_C, 2:].T
            x_C = logits_FV[front_C, token_C].double()
            x_C = torch.where(x_C > 0, x_C / repetition_C, x_C * repetition_C) - occurrence_C + bias_C
            logits_FV[front_C, token_C] = x_C.to(logits_FV.dtype)
        if variant.has_masks:
            bits_FMB = inputs.masks_RM[:, :, None] >> torch.arange(64, device=logits_FV.device)
            is_allowed_FV = (bits_FMB & 1).bool().flatten(1)[:, :vocab_size]
            logits_FV.masked_fill_(~is_allowed_FV, -torch.inf)
        return logits_FV

    return change


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
    size = max(1, 256 // len(states_ECD))  # rows of a batch, few enough for the memory of the logits [S, E, V]
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
