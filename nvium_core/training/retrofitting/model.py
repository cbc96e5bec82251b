"""The model that gets exits and a drafter: a backbone in its own precision, frozen or with low-rank updates, what is
added in float32, and their losses on a batch beside the original.

Shapes: R rows, D width, E exits, K early exits, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvium_core.model import mixture
from nvium_core.model.config import NviumConfig
from nvium_core.model.drafter import Drafter
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.llama import RMSNorm, causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.data.windows import Batch
from nvium_core.training.retrofitting.distillation import head_kl, teacher_of
from nvium_core.training.retrofitting.low_rank import LowRankUpdates

RELUCTANCE = 2.0
"""The first bias of routers against leaving: at first almost no row does, as early exits predict nothing yet."""


@dataclass(frozen=True)
class Rows:
    """Of a batch's rows that count: the early exits' normed rows, the last exit's, the original's (the same if the
    backbone is frozen), the tokens that came, [R], and what a drafter knows beforehand: the last exit's rows one
    position earlier, zeros where a document begins, and embeddings of the rows' own tokens."""

    early: list[Tensor]
    last_RD: Tensor
    original_RD: Tensor
    target_R: Tensor
    before_RD: Tensor
    token_RD: Tensor


@dataclass(frozen=True)
class Losses:
    """Of a batch's rows: KL of exits [R, E] and of the drafter [R] to the original, −log π_k of the tokens that came
    [R, E] and the original's [R], and the routers' log p [R, E]."""

    kl_RE: Tensor
    draft_kl_R: Tensor
    nll_RE: Tensor
    original_nll_R: Tensor
    log_p_RE: Tensor


class WithExits:
    """`fast` is what the device multiplies matrices in fastest; the backbone is in it if that loses nothing. With a
    `rank` the backbone has low-rank updates, and `source`, which stays as it is, is kept beside it as the teacher."""

    def __init__(
        self, source: NviumForCausalLM, config: NviumConfig, fast: torch.dtype, rank: int | None = None
    ) -> None:
        self.stored = source.dtype
        self.model = NviumForCausalLM(config)
        self.model.requires_grad_(False)
        precise = torch.promote_types(self.stored, torch.float32)
        for part in (self.model.model, self.model.lm_head):
            cast(part, fast if fast == self.stored else precise)
        self.model.model.load_state_dict(source.model.state_dict())
        self.model.lm_head.load_state_dict(source.lm_head.state_dict())
        self.model.generation_config = source.generation_config
        final_norm = source.get_parameter("exits.0.norm.weight")
        for exit_ in self.model.exits:
            exit_.get_parameter("norm.weight").data.copy_(final_norm)
        self.source, self.updates = None, None
        if rank:
            self.source = source.requires_grad_(False)
            cast(source.model, self.model.model.embed_tokens.weight.dtype)
            self.updates = LowRankUpdates(self.model.model, source.model, rank, self.stored)
        self.drafter.requires_grad_(True)
        for exit_ in self.early:
            exit_.requires_grad_(True)
            assert exit_.router is not None
            exit_.router.head.bias.data[CONTINUE], exit_.router.head.bias.data[EXIT] = RELUCTANCE, -RELUCTANCE

    @property
    def early(self) -> list[Exit]:
        return [exit_ for exit_ in self.model.exits[:-1] if isinstance(exit_, Exit)]

    @property
    def drafter(self) -> Drafter:
        assert self.model.drafter is not None
        return self.model.drafter

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight

    def rows(self, batch: Batch, *, adapts: bool = False) -> Rows:
        """Normed rows, the early ones as their norms are now, with a gradient to them, and if the backbone `adapts`, to
        it too."""
        counted_R = batch.counted.flatten()
        attend = causal_attention(batch.mask())
        with torch.set_grad_enabled(adapts):
            states = self.model.hidden_states(batch.inputs, batch.positions, attend)
            last_XD = self._final_norm(states[-1].float()).flatten(0, 1)
        original_RD = last_XD.detach()[counted_R]
        with torch.no_grad():
            if self.source and self.updates and self.updates.are_begun:
                [original_BTD] = self.source.hidden_states(batch.inputs, batch.positions, attend)
                original_RD = self._final_norm(original_BTD.float()).flatten(0, 1)[counted_R]
            before_XD = last_XD.roll(1, 0) * (batch.positions.flatten() > 0)[:, None]
            token_RD = self.model.model.embed_tokens(batch.inputs.flatten()[counted_R])
        early = [
            exit_.norm(h_BTD.flatten(0, 1)[counted_R].float()) for exit_, h_BTD in zip(self.early, states, strict=False)
        ]
        last_RD, target_R = last_XD[counted_R], batch.targets.flatten()[counted_R]
        return Rows(early, last_RD, original_RD, target_R, before_XD[counted_R], token_RD)

    @property
    def _final_norm(self) -> RMSNorm:
        last = self.model.exits[-1]
        assert isinstance(last, Exit)
        return last.norm

    def losses(self, rows: Rows) -> Losses:
        """Routers see rows without a gradient, so that they and the exits learn beside each other."""
        teacher = teacher_of(rows.original_RD, self.head, rows.target_R)
        outputs = [exit_.adapter(x_RD) for exit_, x_RD in zip(self.early, rows.early, strict=True)]
        found = [head_kl(output_RD, self.head, teacher, rows.target_R) for output_RD in outputs]
        if self.updates:
            found.append(head_kl(rows.last_RD, self.head, teacher, rows.target_R))
        else:
            found.append((torch.zeros_like(teacher.nll_R), teacher.nll_R))
        kl_RE, nll_RE = (torch.stack(each, 1) for each in zip(*found, strict=True))
        drafted_RD = self.drafter(rows.before_RD, rows.token_RD)
        draft_kl_R, _ = head_kl(drafted_RD, self.head, teacher, rows.target_R)
        log_p_RE = self.log_exit_probs([x_RD.detach() for x_RD in rows.early])
        return Losses(kl_RE, draft_kl_R, nll_RE, teacher.nll_R, log_p_RE)

    def log_exit_probs(self, early: list[Tensor]) -> Tensor:
        """log p [R, E] of the early exits' rows."""
        log_ws = [exit_.route(x_RD) for exit_, x_RD in zip(self.early, early, strict=True)]
        return mixture.log_exit_probs(torch.stack([*log_ws, _certain(log_ws[-1])], 1))

    def exit_weights(self) -> list[nn.Parameter]:
        """Norms and adapters of the early exits."""
        return [weight for exit_ in self.early for part in (exit_.norm, exit_.adapter) for weight in part.parameters()]

    def router_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early if exit_.router is not None for weight in exit_.router.parameters()]

    def as_stored(self) -> NviumForCausalLM:
        """The model in the source's precision: without updates its backbone and last exit as they were, bit for bit."""
        model = NviumForCausalLM(self.model.config)
        model.load_state_dict(self.model.state_dict())
        cast(model, self.stored)
        model.generation_config = self.model.generation_config
        return model


def _certain(log_w_R2: Tensor) -> Tensor:
    """The last exit's log w: never continue."""
    certain_R2 = torch.zeros_like(log_w_R2)
    certain_R2[:, CONTINUE] = -torch.inf
    return certain_R2


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights alone: tables that are computed, as of rotary embeddings, stay as precise as they are."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
