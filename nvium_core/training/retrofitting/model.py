"""The model that a retrofit trains: a frozen backbone, trainable exits in float32, and the losses on a batch.

After the training, all routers' log-odds are shifted by one number, so that the mean depth is exactly the requested
depth. Training brings it only close. The mean depth falls as the shift grows, so a bisection on some rows finds the
shift. Sampling from the shifted mixture is exact, too.

Shapes: R rows, D width, E exits, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.training.data.windows import Batch, Windows
from nvium_core.training.retrofitting.distillation import head_kl, teacher_of

INITIAL_BIAS = 2.0
"""Initial bias of routers towards continuing. With it, almost no row leaves at an untrained exit."""


@dataclass(frozen=True)
class TeacherRows:
    """A batch's rows that count in the loss: normed hidden states of the early and last exits, and targets [R]."""

    early: list[Tensor]
    last_RD: Tensor
    target_R: Tensor


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

    def losses(self, rows: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the KL from base to exit, −log π_k of the targets, and log p, [R, E] each."""
        *outputs, last_RD = self.outputs(rows)
        teacher = teacher_of(last_RD, self.head, rows.target_R)
        losses = [head_kl(output_RD, self.head, teacher, rows.target_R) for output_RD in outputs]
        losses.append((torch.zeros_like(teacher.nll_R), teacher.nll_R))
        kl_RE, nll_RE = (torch.stack(each, 1) for each in zip(*losses, strict=True))
        return kl_RE, nll_RE, mixture.log_exit_probs(self.route(rows))

    def route(self, rows: TeacherRows) -> Tensor:
        """Return log w [R, E, 2]. The routers' input is detached, so the exits' norms get no gradients from routers."""
        states = (*rows.early, rows.last_RD)
        return torch.stack([exit_.route(x_RD.detach()) for exit_, x_RD in zip(self.exits, states, strict=True)], 1)

    def exit_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early for part in (exit_.norm, exit_.adapter) for weight in part.parameters()]

    def router_weights(self) -> list[nn.Parameter]:
        return [weight for exit_ in self.early if exit_.router is not None for weight in exit_.router.parameters()]


NUM_ROWS = 32_768  # training tokens on which the depth is measured

MAX_SHIFT, NUM_BISECTIONS = 32.0, 48


def shift_to_depth(model: WithExits, stream: Windows, context: int, depth: float) -> float:
    """Shift the routers so that the mean depth on the stream's first rows is `depth`. Return the shift."""
    shift = shift_to(depth, router_log_odds(model, stream, context), model.model.config.exit_layers or [])
    shift_routers(model.early, shift)
    return shift


@torch.no_grad()
def router_log_odds(model: WithExits, stream: Windows, context: int) -> Tensor:
    """Run the routers on the stream's first rows that count towards the loss. Return the log-odds of exiting [R, E]."""
    parts = list[Tensor]()
    for window in range(stream.num_windows(context)):
        if sum(map(len, parts)) >= NUM_ROWS:
            break
        rows = model.rows(stream.batch(window, 1, context))
        parts.append(log_odds(model.route(rows)))
    return torch.cat(parts)


def log_odds(log_w_RE2: Tensor) -> Tensor:
    """Return the log-odds of exiting [R, E]. Those of the last exit are infinite."""
    return log_w_RE2[..., EXIT] - log_w_RE2[..., CONTINUE]


def shifted_log_exit_probs(log_odds_RE: Tensor, shift: float) -> Tensor:
    """Return log p [R, E] after raising the log-odds by `shift`."""
    shifted_RE = log_odds_RE + shift
    return mixture.log_exit_probs(F.logsigmoid(torch.stack([-shifted_RE, shifted_RE], -1)))  # continue, exit


def shift_to(depth: float, log_odds_RE: Tensor, exit_layers: Sequence[int]) -> float:
    """Return the shift at which the rows' mean depth is closest to `depth`."""
    log_odds_RE = log_odds_RE.double()
    low, high = -MAX_SHIFT, MAX_SHIFT
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        too_deep = mixture.mean_depth(shifted_log_exit_probs(log_odds_RE, middle), exit_layers).mean() > depth
        low, high = (middle, high) if too_deep else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def shift_routers(early: Iterable[Exit], shift: float) -> None:
    for exit_ in early:
        assert exit_.router is not None
        exit_.router.head.bias[EXIT] += shift * exit_.router.temperature
