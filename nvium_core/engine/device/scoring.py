"""Log-probabilities of rows that have passed every block: log π_mix, exact, whichever exit has emitted.

A row's hidden states at the inner boundaries are kept until it leaves the last block; then all exits are evaluated
together. A sequence has at most `SCORE_WINDOW` rows under way, so row t has the entry t modulo the window in its
seat's part of the ledger.

Shapes: S rows to score, E exits, D width, V vocabulary.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import SCORE_WINDOW, Sequence
from nvium_core.engine.schedule.step import FrontDecision
from nvium_core.model import mixture
from nvium_core.model.nvium import NviumForCausalLM

Rows = Mapping[Sequence, range]
"""Rows to score; in the order of the sequences, their hidden states are h_SD."""


class Ledger:
    def __init__(self, model: NviumForCausalLM, *, max_sequences: int, rows_at_once: int) -> None:
        """`rows_at_once` bounds the rows whose exits' logits, [S, E, V], are held at the same time."""
        config = model.config
        self.last_block = config.num_exits - 1
        self._rows_at_once = rows_at_once
        self._model = model
        self._states = model.lm_head.weight.new_zeros(self.last_block, max_sequences * SCORE_WINDOW, config.hidden_size)

    def keep(self, block: int, wanted: Rows, h_SD: Tensor) -> None:
        """Hidden states behind a block."""
        self._states[block, places(wanted)] = h_SD

    def score(
        self, wanted: Rows, h_SD: Tensor, decisions: Mapping[Sequence, FrontDecision]
    ) -> dict[Sequence, list[Score]]:
        """Scores after the last block. `decisions` have the tokens that fronts have just emitted."""
        states = torch.stack([*self._states[:, places(wanted)], h_SD])
        targets = [token for sequence, rows in wanted.items() for token in next_tokens(sequence, rows, decisions)]
        num_top = [sequence.params.logprobs or 0 for sequence, rows in wanted.items() for _ in rows]
        scores = self._scores(states, targets, num_top)
        return {sequence: [next(scores) for _ in rows] for sequence, rows in wanted.items()}

    def _scores(self, states_ESD: Tensor, targets: list[int], num_top: list[int]) -> Iterator[Score]:
        """Of rows whose next tokens are known, a few at a time."""
        max_top = min(max(num_top), self._model.config.vocab_size)
        for first in range(0, len(targets), self._rows_at_once):
            part = slice(first, first + self._rows_at_once)
            log_mix_SV = self._log_mixture(states_ESD[:, part])
            target_S1 = torch.tensor(targets[part], device=log_mix_SV.device)[:, None]
            logprobs = log_mix_SV.gather(-1, target_S1)[:, 0].tolist()
            top = log_mix_SV.topk(max_top, dim=-1)
            for row in zip(logprobs, top.indices.tolist(), top.values.tolist(), num_top[part], strict=True):
                logprob, ids, values, count = row
                yield Score(logprob, tuple(zip(ids, values, strict=True))[:count])

    def _log_mixture(self, states_ESD: Tensor) -> Tensor:
        log_w_SE2, outputs = self._model.exit_outputs(list(states_ESD))
        exit_logits_SEV = torch.stack([self._model.lm_head(o_SD) for o_SD in outputs], dim=-2)
        return mixture.log_mixture(mixture.log_exit_probs(log_w_SE2), exit_logits_SEV)


def places(wanted: Rows) -> list[int]:
    """Where the rows are in the ledger."""
    return [(sequence.seat or 0) * SCORE_WINDOW + t % SCORE_WINDOW for sequence, rows in wanted.items() for t in rows]


def next_tokens(sequence: Sequence, rows: range, decisions: Mapping[Sequence, FrontDecision]) -> list[int]:
    """The tokens after these rows; the front's is the one it has just emitted, 0 if it could emit none."""
    known = sequence.token_ids[rows.start + 1 : rows.stop + 1]
    return known if len(known) == len(rows) else [*known, max(decisions[sequence].token_id or 0, 0)]
