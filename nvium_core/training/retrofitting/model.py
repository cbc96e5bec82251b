"""The model that gets exits: a frozen backbone in its own precision, exits in float32, and their losses on a batch.

Shapes: R rows, D width, E exits, K early exits, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvium_core.model import mixture
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.llama import RMSNorm, causal_attention
from nvium_core.training.data.windows import Batch
from nvium_core.training.retrofitting.distillation import head_kl, teacher_of

RELUCTANCE = 2.0
"""The first bias of routers against leaving: at first almost no row does, as early exits predict nothing yet."""


@dataclass(frozen=True)
class Rows:
    """A batch's counted rows: the early exits' normed rows, the last exit's (the base's), and the target tokens [R]."""

    early: list[Tensor]
    last_RD: Tensor
    target_R: Tensor


@dataclass(frozen=True)
class Losses:
    """Of a batch's rows: KL of each exit to the base [R, E], −log π_k of the target [R, E] and the base's [R], and the
    routers' log p [R, E]."""

    kl_RE: Tensor
    nll_RE: Tensor
    original_nll_R: Tensor
    log_p_RE: Tensor


class WithExits:
    """`fast` is the device's fastest precision for matrix products; the backbone uses it if that loses nothing."""

    def __init__(self, source: NviumForCausalLM, config: NviumConfig, fast: torch.dtype) -> None:
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
        for exit_ in self.early:
            exit_.requires_grad_(True)
            assert exit_.router is not None
            exit_.router.head.bias.data[CONTINUE], exit_.router.head.bias.data[EXIT] = RELUCTANCE, -RELUCTANCE

    @property
    def early(self) -> list[Exit]:
        return [exit_ for exit_ in self.model.exits[:-1] if isinstance(exit_, Exit)]

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight

    def rows(self, batch: Batch) -> Rows:
        """Normed rows, with a gradient to the early exits' norms."""
        counted_R = batch.counted.flatten()
        attend = causal_attention(batch.mask())
        with torch.no_grad():
            states = self.model.hidden_states(batch.inputs, batch.positions, attend)
            last_RD = self._final_norm(states[-1].float()).flatten(0, 1)[counted_R]
        early = [
            exit_.norm(h_BTD.flatten(0, 1)[counted_R].float()) for exit_, h_BTD in zip(self.early, states, strict=False)
        ]
        return Rows(early, last_RD, batch.targets.flatten()[counted_R])

    @property
    def _final_norm(self) -> RMSNorm:
        last = self.model.exits[-1]
        assert isinstance(last, Exit)
        return last.norm

    def losses(self, rows: Rows) -> Losses:
        """Routers see rows without a gradient, so that routers and exits learn independently."""
        teacher = teacher_of(rows.last_RD, self.head, rows.target_R)
        outputs = [exit_.adapter(x_RD) for exit_, x_RD in zip(self.early, rows.early, strict=True)]
        found = [head_kl(output_RD, self.head, teacher, rows.target_R) for output_RD in outputs]
        found.append((torch.zeros_like(teacher.nll_R), teacher.nll_R))
        kl_RE, nll_RE = (torch.stack(each, 1) for each in zip(*found, strict=True))
        log_p_RE = self.log_exit_probs([x_RD.detach() for x_RD in rows.early])
        return Losses(kl_RE, nll_RE, teacher.nll_R, log_p_RE)

    def log_exit_probs(self, early: list[Tensor]) -> Tensor:
        """log p [R, E] of the early exits' rows."""
        log_ws = [exit_.route(x_RD) for exit_, x_RD in zip(self.early, early, strict=True)]
        return mixture.log_exit_probs(torch.stack([*log_ws, _certain(log_ws[-1])], 1))

    def exit_weights(self) -> list[nn.Parameter]:
        """Norms and adapters of the early exits."""
        return [weight for exit_ in self.early for part in (exit_.norm, exit_.adapter) for weight in part.parameters()]

    def router_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early if exit_.router is not None for weight in exit_.router.parameters()]

    def early_tensors(self) -> dict[str, Tensor]:
        """The early exits' weights, by their names in the model."""
        last = f"exits.{len(self.early)}."
        tensors = self.model.state_dict().items()
        return {name: weight for name, weight in tensors if name.startswith("exits.") and not name.startswith(last)}


def _certain(log_w_R2: Tensor) -> Tensor:
    """The last exit's log w: never continue."""
    certain_R2 = torch.zeros_like(log_w_R2)
    certain_R2[:, CONTINUE] = -torch.inf
    return certain_R2


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights alone: tables that are computed, as of rotary embeddings, stay as precise as they are."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
