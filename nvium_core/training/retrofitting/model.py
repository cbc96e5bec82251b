"""The model that a retrofit trains: a frozen backbone, trainable exits in float32, and the losses on a batch.

The KL(π_N ‖ π_k) is over the last exit's most likely tokens, with all other tokens as one class. Let p be the last
exit's distribution and q the early exit's. Let p_rest and q_rest be the probabilities that p and q give to all tokens
except p's top tokens, and r = 1 − p_rest / q_rest. With respect to the logits, the gradient of the KL is q − p at a top
token and q r elsewhere. The code computes q r for all tokens and adds a correction at the top tokens. The gradient of
−log π_k(target) is q − 1 at the target and q elsewhere. Both gradients need the product of q and the head. The forward
pass computes this product once per chunk of rows, and keeps no logits.

After the training, all routers' log-odds are shifted by one number, so that the mean depth is exactly the requested
depth. Training brings it only close. The mean depth falls as the shift grows, so a bisection on some rows finds the
shift. Sampling from the shifted mixture is exact, too.

Shapes: R rows, C rows of a chunk, K top tokens, D width, E exits, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.training.data.windows import Batch, Windows

CHUNK_ROWS = 128
TOP = 32
LEAST = 1e-6  # lower bound of probabilities, so that their logarithms are finite

INITIAL_BIAS = 2.0
"""Initial bias of routers towards continuing. With it, almost no row leaves at an untrained exit."""

NUM_ROWS = 32_768  # training tokens on which the depth is measured

MAX_SHIFT, NUM_BISECTIONS = 32.0, 48


class Teacher(NamedTuple):
    """The last exit's top tokens for each row, their probabilities, and −log π_N of the target."""

    top_RK: Tensor
    probs_RK: Tensor
    nll_R: Tensor


@torch.no_grad()
def teacher_of(output_RD: Tensor, head_VD: Tensor, target_R: Tensor) -> Teacher:
    parts = []
    for output_CD, target_C in zip(output_RD.split(CHUNK_ROWS), target_R.split(CHUNK_ROWS), strict=True):
        logits_CV = F.linear(output_CD.to(head_VD.dtype), head_VD).float()
        log_sum_C1 = logits_CV.logsumexp(-1, keepdim=True)
        top_logits_CK, top_CK = logits_CV.topk(min(TOP, len(head_VD) - 1), sorted=False)
        nll_C = (log_sum_C1 - logits_CV.gather(1, target_C[:, None])).squeeze(1)
        parts.append((top_CK, (top_logits_CK - log_sum_C1).exp(), nll_C))
    return Teacher(*map(torch.cat, zip(*parts, strict=True)))


def head_kl(output_RD: Tensor, head_VD: Tensor, teacher: Teacher, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's KL [R] and −log π_k of its target [R]."""
    losses: tuple[Tensor, Tensor] = HeadKl.apply(output_RD, head_VD, teacher.top_RK, teacher.probs_RK, target_R)
    return losses


class HeadKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output_RD: Tensor, head_VD: Tensor, top_RK: Tensor, probs_RK: Tensor, target_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(*(x.split(CHUNK_ROWS) for x in (output_RD, top_RK, probs_RK, target_R)), strict=True)
        results = [_chunk_losses(head_VD, *chunk) for chunk in chunks]
        kl_R, nll_R, kl_gradient_RD, nll_gradient_RD = map(torch.cat, zip(*results, strict=True))
        ctx.save_for_backward(kl_gradient_RD, nll_gradient_RD)
        return kl_R, nll_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, kl_R: Tensor, nll_R: Tensor) -> tuple[Tensor, None, None, None, None]:
        kl_gradient_RD, nll_gradient_RD = ctx.saved_tensors
        return kl_gradient_RD * kl_R[:, None] + nll_gradient_RD * nll_R[:, None], None, None, None, None


def _chunk_losses(
    head_VD: Tensor, output_CD: Tensor, top_CK: Tensor, p_CK: Tensor, target_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return KL [C], −log π_k of the target [C], and the gradients of both with respect to the outputs [C, D]."""
    logits_CV = F.linear(output_CD.to(head_VD.dtype), head_VD).float()
    top_logits_CK, target_logit_C1 = logits_CV.gather(1, top_CK), logits_CV.gather(1, target_C[:, None])
    max_C1 = logits_CV.amax(-1, keepdim=True)
    scaled_q_CV = logits_CV.sub_(max_C1).exp_()
    scale_C1 = scaled_q_CV.sum(-1, keepdim=True)
    log_sum_C1 = max_C1 + scale_C1.log()
    log_q_CK = top_logits_CK - log_sum_C1
    q_CK = log_q_CK.exp()
    p_rest_C1, q_rest_C1 = ((1 - x.sum(1, keepdim=True)).clamp_min(LEAST) for x in (p_CK, q_CK))
    kl_CK = p_CK * (p_CK.clamp_min(LEAST).log() - log_q_CK)
    kl_C = kl_CK.sum(1) + (p_rest_C1 * (p_rest_C1 / q_rest_C1).log()).squeeze(1)
    r_C1 = 1 - p_rest_C1 / q_rest_C1
    mean_CD = (scaled_q_CV.to(head_VD.dtype) @ head_VD).float() / scale_C1
    correction_C1K = (q_CK - p_CK - q_CK * r_C1)[:, None].to(head_VD.dtype)
    kl_gradient_CD = mean_CD * r_C1 + (correction_C1K @ head_VD[top_CK]).squeeze(1)
    nll_gradient_CD = mean_CD - head_VD[target_C]
    nll_C = (log_sum_C1 - target_logit_C1).squeeze(1)
    return kl_C, nll_C, kl_gradient_CD.to(output_CD.dtype), nll_gradient_CD.to(output_CD.dtype)


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


def shift_to_depth(model: WithExits, stream: Windows, depth: float) -> float:
    """Shift the routers so that the mean depth on the stream's first rows is `depth`. Return the shift."""
    shift = shift_to(depth, router_log_odds(model, stream), model.model.config.exit_layers or [])
    shift_routers(model.early, shift)
    return shift


@torch.no_grad()
def router_log_odds(model: WithExits, stream: Windows) -> Tensor:
    """Run the routers on the stream's first rows that count towards the loss. Return the log-odds of exiting [R, E]."""
    parts = list[Tensor]()
    for window in range(stream.num_windows):
        if sum(map(len, parts)) >= NUM_ROWS:
            break
        rows = model.rows(stream.batch(window, 1))
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
