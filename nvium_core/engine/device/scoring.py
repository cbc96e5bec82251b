"""Log-probabilities of rows that have passed every block: log π_mix, exact, whichever exit has spoken.

A row's hidden states at the inner boundaries are kept in a ledger until it leaves the last block; then every exit is
heard at once. A sequence never has more than `SCORE_WINDOW` rows under way, so row t has the entry t modulo the window
in its seat's part of the ledger.

Shapes: S rows of the Step to score, E exits, D width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.engine.schedule.sequence import SCORE_WINDOW
from nvium_core.model import mixture
from nvium_core.model.nvium import NviumForCausalLM


class Ledger:
    def __init__(self, model: NviumForCausalLM, *, max_sequences: int, rows_at_once: int) -> None:
        """`rows_at_once` bounds the rows whose exits' logits, [S, E, V], are held at the same time."""
        config = model.config
        self._rows_at_once = rows_at_once
        self._model = model
        self._states = model.lm_head.weight.new_zeros(
            config.num_exits - 1, max_sequences * SCORE_WINDOW, config.hidden_size
        )

    def keep(self, step: Step, h_SD: Tensor) -> None:
        """Enter the hidden states of rows to be scored, as they are after the Step's block."""
        self._states[step.block, places(step)] = h_SD

    def score(self, step: Step, h_SD: Tensor, spoken: Items[int]) -> list[list[Score]]:
        """The scores of each run's rows after the last block. `spoken` are the tokens of the fronts reached."""
        states = torch.stack([*self._states[:, places(step)], h_SD])
        scores = self._hear(states, list(next_tokens(step, spoken)), num_alternatives(step))
        return [[next(scores) for _ in run.sequence.rows_to_score(run.rows)] for run in step.runs]

    def _hear(self, states_ESD: Tensor, targets: list[int], num_top: list[int]) -> Iterator[Score]:
        """Score rows whose next tokens are known, a few at a time."""
        most = min(max(num_top), self._model.config.vocab_size)
        for first in range(0, len(targets), self._rows_at_once):
            part = slice(first, first + self._rows_at_once)
            log_mix_SV = self._log_mixture(states_ESD[:, part])
            target_S1 = torch.tensor(targets[part], device=log_mix_SV.device)[:, None]
            logprobs = log_mix_SV.gather(-1, target_S1)[:, 0].tolist()
            top = log_mix_SV.topk(most, dim=-1)
            for row in zip(logprobs, top.indices.tolist(), top.values.tolist(), num_top[part], strict=True):
                logprob, ids, values, count = row
                yield Score(logprob, tuple(zip(ids, values, strict=True))[:count])

    def _log_mixture(self, states_ESD: Tensor) -> Tensor:
        log_w_SE2, outputs = self._model.exit_outputs(list(states_ESD))
        exit_logits_SEV = torch.stack([self._model.lm_head(o_SD) for o_SD in outputs], dim=-2)
        return mixture.log_mixture(mixture.log_exit_probs(log_w_SE2), exit_logits_SEV)


def places(step: Step) -> list[int]:
    """Where the rows to be scored stand in the ledger."""
    return [
        (run.sequence.seat or 0) * SCORE_WINDOW + t % SCORE_WINDOW
        for run in step.runs
        for t in run.sequence.rows_to_score(run.rows)
    ]


def next_tokens(step: Step, spoken: Items[int]) -> Iterator[int]:
    """The tokens after those rows; a front's own is the one it has just spoken."""
    answers = iter(spoken)
    for run in step.runs:
        known, rows = run.sequence.token_ids, run.sequence.rows_to_score(run.rows)
        yield from known[rows.start + 1 : rows.stop + 1]
        if run.reaches_front:
            spoken_here = next(answers)
            yield from [spoken_here] if rows else []


def num_alternatives(step: Step) -> list[int]:
    return [run.sequence.params.logprobs or 0 for run in step.runs for _ in run.sequence.rows_to_score(run.rows)]
