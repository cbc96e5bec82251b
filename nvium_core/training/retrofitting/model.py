"""The model that a retrofit trains: a frozen backbone, trainable exits in float32, and the losses on a batch.

Shapes: R rows, D width, E exits, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nvium_core.model import mixture
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.training.data.windows import Batch
from nvium_core.training.retrofitting.distillation import head_kl, teacher_of

INITIAL_BIAS = 2.0
"""Initial bias of routers towards continuing. With it, almost no row leaves at an untrained exit."""


@dataclass(frozen=True)
class TeacherRows:
    """A batch's rows that count in the loss: normed hidden states of the early and last exits, and targets [R]."""

    early: list[Tensor]
    last_RD: Tensor
    target_R: Tensor


@dataclass(frozen=True)
class Losses:
    """KL from base to exit [R, E], −log π_k of the targets [R, E], the base's −log π_N [R], and log p [R, E]."""

    kl_RE: Tensor
    nll_RE: Tensor
    original_nll_R: Tensor
    log_p_RE: Tensor


class WithExits:
    """A base model with exits. The backbone keeps its stored dtype if that is `fast`. Else it has float32 or better."""

    def __init__(self, source: NviumForCausalLM, config: NviumConfig, fast: torch.dtype) -> None:
        self.stored = source.dtype
        self.model = NviumForCausalLM(config)
        self.model.requires_grad_(False)
        dtype = fast if fast == self.stored else torch.promote_types(self.stored, torch.float32)
        for part in (self.model.model, self.model.lm_head):
            for weight in part.parameters():  # module.to() would also cast buffers such as rotary tables
                weight.data = weight.data.to(dtype)
        self.model.model.load_state_dict(source.model.state_dict())
        self.model.lm_head.load_state_dict(source.lm_head.state_dict())
        self.model.generation_config = source.generation_config
        final_norm = source.get_parameter("exits.0.norm.weight")
        for exit_ in self.model.exits:
            exit_.get_parameter("norm.weight").data.copy_(final_norm)
        for exit_ in self.early:
            exit_.requires_grad_(True)
            assert exit_.router is not None
            exit_.router.head.bias.data[CONTINUE], exit_.router.head.bias.data[EXIT] = INITIAL_BIAS, -INITIAL_BIAS

    @property
    def exits(self) -> list[Exit]:
        return cast(list[Exit], list(self.model.exits))

    @property
    def early(self) -> list[Exit]:
        return self.exits[:-1]

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight

    def rows(self, batch: Batch) -> TeacherRows:
        """Run the backbone and the exits' norms. Gradients reach only the early exits' norms."""
        counted_R = batch.counted.flatten()
        with torch.no_grad():
            states = self.model.hidden_states(batch.inputs, batch.positions, batch.attention())
        rows = (h_BTD.flatten(0, 1)[counted_R].float() for h_BTD in states)
        *early, last_RD = [exit_.norm(h_RD) for exit_, h_RD in zip(self.exits, rows, strict=True)]
        return TeacherRows(early, last_RD, batch.targets.flatten()[counted_R])

    def outputs(self, rows: TeacherRows) -> list[Tensor]:
        """Return what `head` maps to logits at each exit, [R, D] each."""
        early = (exit_.adapter(x_RD) for exit_, x_RD in zip(self.early, rows.early, strict=True))
        return [self.model.lm_head.scale * o_RD for o_RD in (*early, rows.last_RD)]

    def losses(self, rows: TeacherRows) -> Losses:
        *outputs, last_RD = self.outputs(rows)
        teacher = teacher_of(last_RD, self.head, rows.target_R)
        losses = [head_kl(output_RD, self.head, teacher, rows.target_R) for output_RD in outputs]
        losses.append((torch.zeros_like(teacher.nll_R), teacher.nll_R))
        kl_RE, nll_RE = (torch.stack(each, 1) for each in zip(*losses, strict=True))
        return Losses(kl_RE, nll_RE, teacher.nll_R, mixture.log_exit_probs(self.route(rows)))

    def route(self, rows: TeacherRows) -> Tensor:
        """Return log w [R, E, 2]. The routers' input is detached, so the exits' norms get no gradients from routers."""
        states = (*rows.early, rows.last_RD)
        return torch.stack([exit_.route(x_RD.detach()) for exit_, x_RD in zip(self.exits, states, strict=True)], 1)

    def exit_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early for part in (exit_.norm, exit_.adapter) for weight in part.parameters()]

    def router_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early if exit_.router is not None for weight in exit_.router.parameters()]

    def early_tensors(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}
