"""The junction after a block: which front rows speak, and which tokens.

Shapes: F front rows, R some of them, D width, V vocabulary.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import compress
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.randomness import ROUTE, TOKEN, Purpose, uniform
from nvium_core.engine.sampling import NO_TOKEN, Truncation, certified_argmax, draw
from nvium_core.engine.sequence import Sequence
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM


@dataclass(frozen=True, slots=True)
class Junction:
    """What one front row did: the token it spoke, if any, and the router's log-probabilities.

    `NO_TOKEN` is spoken where the model produced NaN or infinities.
    """

    token_id: int | None
    log_exit: float
    log_continue: float


class Junctions:
    """The model's exits, asked for many sequences at once."""

    def __init__(self, model: NviumForCausalLM, *, max_sequences: int) -> None:
        self._model = model
        self._device = model.device
        self._mixture = torch.zeros(2, max_sequences, model.config.vocab_size, dtype=torch.float64, device=model.device)
        """The partial mixtures of greedy sequences, by seat. Blocks take turns between the two, so that no Step
        overwrites what it reads."""

    def ask(self, block: int, sequences: Items[Sequence], h_FD: Tensor) -> list[Junction]:
        """One answer per front row, given their hidden states after the block."""
        exit_ = cast(Exit, self._model.exits[block])
        x_FD = exit_.norm(h_FD)
        log_w_F2 = exit_.route(x_FD).double()
        sane_F = ~log_w_F2.isnan().any(-1)
        greedy_F = self._tensor([s.params.is_greedy for s in sequences]) & sane_F
        routed_F = self._uniforms(block, sequences, ROUTE) < log_w_F2[:, EXIT].exp()
        speaks_F = (routed_F & ~greedy_F) | ~sane_F
        token_F = torch.full(speaks_F.shape, NO_TOKEN, device=self._device)
        drawn_F = speaks_F & sane_F
        if bool(drawn_F.any()):
            logits_RV = self._model.lm_head(exit_.adapter(x_FD[drawn_F]))
            token_F[drawn_F] = self._draw(block, chosen(sequences, drawn_F), logits_RV)
        if bool(greedy_F.any()):
            logits_RV = self._model.lm_head(exit_.adapter(x_FD[greedy_F]))
            decided = self._decide(block, chosen(sequences, greedy_F), logits_RV, log_w_F2[greedy_F])
            token_F[greedy_F], speaks_F[greedy_F] = decided
        answers = zip(speaks_F.tolist(), token_F.tolist(), log_w_F2.tolist(), strict=True)
        return [Junction(token if speaks else None, log_w[EXIT], log_w[CONTINUE]) for speaks, token, log_w in answers]

    def _draw(self, block: int, sequences: Items[Sequence], logits_RV: Tensor) -> Tensor:
        """A token from f(π_k) for each row, [R]."""
        params = [s.params for s in sequences]
        truncation = Truncation(
            self._tensor([p.temperature for p in params], torch.float64),
            self._tensor([p.top_k for p in params]),
            self._tensor([p.top_p for p in params], torch.float64),
        )
        return draw(logits_RV, truncation, self._uniforms(block, sequences, TOKEN))

    def _decide(
        self, block: int, sequences: Items[Sequence], logits_RV: Tensor, log_w_R2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Temperature 0: add this exit's share to the mixture so far; its argmax [R], and whether it is final [R]."""
        log_reached_R = self._tensor([s.log_reached for s in sequences], torch.float64)
        share_RV = (log_reached_R + log_w_R2[:, EXIT]).exp()[:, None] * logits_RV.double().softmax(-1)
        seats_R = self._tensor([s.seat for s in sequences])
        mixture_RV = share_RV + (self._mixture[(block - 1) % 2, seats_R] if block else 0)
        self._mixture[block % 2, seats_R] = mixture_RV
        token_R, certain_R = certified_argmax(mixture_RV, (log_reached_R + log_w_R2[:, CONTINUE]).exp())
        is_last = block == self._model.config.num_exits - 1
        return token_R, certain_R | is_last

    def _uniforms(self, block: int, sequences: Items[Sequence], purpose: Purpose) -> Tensor:
        return self._tensor(
            [uniform(s.seed, s.params.choice, s.num_tokens - 1, block, purpose) for s in sequences], torch.float64
        )

    def _tensor(self, values: Items[object], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def chosen(sequences: Items[Sequence], mask_F: Tensor) -> list[Sequence]:
    """The sequences where the mask is True."""
    return list(compress(sequences, mask_F.tolist()))
