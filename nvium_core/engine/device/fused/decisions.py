"""Decides after a pass which front rows emit, with Triton kernels. The reference is `decide` of ../decide.py.

Routers come first, those of all exits in one product. The head multiplies one row per front, that of the exit taken.
Only `DrawKind.ARGMAX` and `DrawKind.MIXTURE` need the head at every exit.

Shapes: F fronts, K exits with a router, N exits, D width, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN
from nvium_core.engine.device.fused import draws, routing
from nvium_core.engine.device.fused.kernels import wide_of
from nvium_core.engine.device.inputs import MAX_FRONTS, InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache, power_of_two
from nvium_core.engine.params import Draw
from nvium_core.model.exits import Adapter, Exit, Router
from nvium_core.model.nvium import Nvium

VOCAB_BLOCK, WIDTH_BLOCK, CHANGE_BLOCK = 1024, 512, 128


class Chosen(NamedTuple):
    """exit_F: the exit taken, −1 for none, −2 for NaN. argmax_F: the mixture's. uniform_F: the number to draw with.

    One buffer for all graphs, because the graph that draws reads what the graph that routes has written.
    """

    exit_F: Tensor
    argmax_F: Tensor
    uniform_F: Tensor


class Mixture(NamedTuple):
    """The exits' logits [N, F, V] and log w [K, F, 2]; for each exit and front, the largest logit and the sum of the
    exponentials below it; of the partial mixtures m_k, the two largest elements and the token of the largest."""

    logits_NFV: Tensor
    log_w_KF2: Tensor
    peak_NF: Tensor
    sum_NF: Tensor
    best_NF: Tensor
    second_NF: Tensor
    token_NF: Tensor


class FusedDecisions:
    """Launches the kernels on copies of the exits' weights, stacked by exit."""

    def __init__(self, model: Nvium, cache: PagedCache) -> None:
        self._model, self._cache, self._config = model, cache, model.config
        exits = [cast(Exit, each) for each in model.exits]
        self._norm_ND = stacked(each.norm.weight for each in exits)
        self._exact = torch.promote_types(model.dtype, torch.float32)
        exit_F, argmax_F = torch.zeros(2, MAX_FRONTS, dtype=torch.long, device=model.device)
        self._chosen = Chosen(exit_F, argmax_F, torch.zeros(MAX_FRONTS, dtype=torch.float64, device=model.device))
        routers = [each.router for each in exits if isinstance(each.router, Router)]
        self._routers = stacked_parameters([router.to(self._exact) for router in routers])
        self._adapters = stacked_parameters([each.adapter for each in exits if isinstance(each.adapter, Adapter)])

    def decide(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        used = range(0 if variant.mixes else blocks.start, blocks.stop)
        x_NFD, x_KFD = self._normalised(used, inputs)
        log_w_KF2 = self._route(used, x_KFD)
        if not variant.mixes:
            self._choose(blocks, used.start, log_w_KF2, None, inputs, answers_4F)
            self._draw(used, x_NFD, inputs, variant, answers_4F)
            return
        mixture = self._mixture(x_NFD, log_w_KF2, inputs, variant)
        self._choose(blocks, used.start, log_w_KF2, mixture, inputs, answers_4F)
        logits_FV = self._selected(mixture, inputs, has_last=blocks.stop == self._config.num_exits)
        self._sample(logits_FV, inputs, variant, answers_4F)

    def route(self, blocks: range, inputs: InputViews, answers_4F: Tensor) -> None:
        _, x_KFD = self._normalised(blocks, inputs)
        self._choose(blocks, blocks.start, self._route(blocks, x_KFD), None, inputs, answers_4F)

    def draw(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        self._draw(blocks, self._normalised(blocks, inputs)[0], inputs, variant, answers_4F)

    def _normalised(self, used: range, inputs: InputViews) -> tuple[Tensor, Tensor]:
        """Return the normalised states of the exits, and of those with a router in the routers' precision."""
        states, config = self._cache.states_NSD, self._config
        slot_F, width = inputs.rows["front_slot"], config.hidden_size
        num_routed = min(used.stop, config.num_exits - 1) - used.start
        x_NFD = states.new_empty(len(used), len(slot_F), width)
        x_KFD = states.new_empty((num_routed, len(slot_F), width), dtype=self._exact)
        sizes = (slot_F.stride(0), states.shape[1], len(slot_F), width, config.rms_norm_eps, num_routed)
        tensors = (states[used.start :], slot_F, self._norm_ND[used.start :], x_NFD, x_KFD)
        grid = (len(slot_F), len(used))
        routing.normalise_exits[grid](*tensors, *sizes, wide=wide_of(states), size=power_of_two(width))
        return x_NFD, x_KFD

    def _route(self, used: range, x_KFD: Tensor) -> Tensor:
        num_routed, num_fronts, width = x_KFD.shape
        log_w_KF2 = x_KFD.new_empty(num_routed, num_fronts, 2)
        if num_routed:
            own = {name: weight[used.start :][:num_routed] for name, weight in self._routers.items()}
            y_KFI = torch.baddbmm(own["fc1.bias"][:, None], x_KFD, own["fc1.weight"].mT)
            y_KFD = torch.baddbmm(own["fc2.bias"][:, None], F.gelu(y_KFI), own["fc2.weight"].mT)
            parts = (own["norm.weight"], own["head.weight"], own["head.bias"], log_w_KF2)
            last = (num_fronts, width, self._config.rms_norm_eps, self._config.router_temperature)
            sizes = {"wide": wide_of(y_KFD), "size": power_of_two(width)}
            routing.route[(num_fronts, num_routed)](y_KFD, *parts, *last, **sizes)
        return log_w_KF2

    def _deltas(self, used: range, x_NFD: Tensor) -> Tensor | None:
        """Return what the adapters of these exits add to the head's inputs, or None without adapters."""
        own = {name: weight[used.start : used.stop] for name, weight in self._adapters.items()}
        return F.silu(x_NFD @ own["up.weight"].mT) @ own["down.weight"].mT if own else None

    def _outputs(self, used: range, x_NFD: Tensor) -> Tensor:
        """Return the head's input at each front's exit, [F, D]."""
        delta_NFD = self._deltas(used, x_NFD)
        if len(used) == 1 and delta_NFD is None:
            return x_NFD[0]
        o_FD = torch.empty_like(x_NFD[0])
        num_fronts, width = o_FD.shape
        tensors = (x_NFD, x_NFD if delta_NFD is None else delta_NFD, self._chosen.exit_F, o_FD)
        flags = {"has_delta": delta_NFD is not None, "block": WIDTH_BLOCK}
        routing.select_outputs[num_fronts, -(-width // WIDTH_BLOCK)](*tensors, num_fronts, width, used.start, **flags)
        return o_FD

    def _choose(
        self,
        blocks: range,
        base: int,
        log_w_KF2: Tensor,
        mixture: Mixture | None,
        inputs: InputViews,
        answers_4F: Tensor,
    ) -> None:
        rows, uniform, chosen = inputs.rows, inputs.rows["uniform"], self._chosen
        num_fronts = len(rows["kind"])
        ranks = (chosen.exit_F,) * 3 if mixture is None else mixture[-3:]
        routing.choose_exits[(num_fronts,)](
            *(log_w_KF2, rows["kind"], rows["first"], uniform, *ranks, answers_4F[EXIT_TAKEN], *chosen),
            *(num_fronts, rows["kind"].stride(0), uniform.stride(2), answers_4F.stride(0)),
            start=blocks.start,
            stop=blocks.stop,
            num_blocks=self._config.num_exits,
            base=base,
            mixes=mixture is not None,
        )

    def _draw(self, used: range, x_NFD: Tensor, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        logits_FV = self._model.lm_head(self._outputs(used, x_NFD))
        self._sample(logits_FV, inputs, variant, answers_4F)

    def _mixture(self, x_NFD: Tensor, log_w_KF2: Tensor, inputs: InputViews, variant: Variant) -> Mixture:
        delta_NFD = self._deltas(range(len(x_NFD)), x_NFD)
        logits_NFV = self._model.lm_head(x_NFD if delta_NFD is None else x_NFD + delta_NFD)
        num_exits, num_fronts, vocab = logits_NFV.shape
        judged_NFV = self._changed(logits_NFV, inputs, variant, only_argmax=True)
        peak_NF, sum_NF, best_NF, second_NF = (
            torch.empty(num_exits, num_fronts, dtype=torch.float64, device=x_NFD.device) for _ in range(4)
        )
        token_NF = torch.empty_like(peak_NF, dtype=torch.long)
        grid = (num_fronts, num_exits)
        draws.measure_exits[grid](judged_NFV, peak_NF, sum_NF, num_fronts, vocab, block=VOCAB_BLOCK)
        measured = (judged_NFV, log_w_KF2, peak_NF, sum_NF)
        draws.rank_mixtures[grid](
            *(*measured, best_NF, second_NF, token_NF, num_fronts, vocab),
            num_blocks=self._config.num_exits,
            block=VOCAB_BLOCK,
        )
        return Mixture(*measured, best_NF, second_NF, token_NF)

    def _changed(self, logits_NFV: Tensor, inputs: InputViews, variant: Variant, *, only_argmax: bool) -> Tensor:
        """Apply g to the logits [N, F, V] of all fronts, or only to those of `DrawKind.ARGMAX`."""
        if not (variant.num_changes or variant.has_masks):
            return logits_NFV
        num_exits, num_fronts, vocab = logits_NFV.shape
        kind_F, masks = inputs.rows["kind"], inputs.masks_RM
        out_NFV = logits_NFV.to(self._exact, copy=True)
        sizes = (kind_F, kind_F.stride(0), num_fronts, vocab)
        if variant.num_changes:
            changes = (inputs.entries_C5, inputs.values_C5, inputs.used)
            grid = (-(-variant.num_changes // CHANGE_BLOCK), num_exits)
            flags = {"only_argmax": only_argmax, "block": CHANGE_BLOCK}
            draws.change_logits[grid](logits_NFV, out_NFV, *changes, *sizes, **flags)
        if variant.has_masks:
            blocks = (num_fronts, -(-vocab // VOCAB_BLOCK), num_exits)
            flags = {"only_argmax": only_argmax, "block": VOCAB_BLOCK}
            draws.mask_logits[blocks](out_NFV, masks, *sizes, masks.shape[1], **flags)
        return out_NFV

    def _selected(self, mixture: Mixture, inputs: InputViews, *, has_last: bool) -> Tensor:
        num_fronts, vocab = mixture.logits_NFV.shape[1:]
        kind_F = inputs.rows["kind"]
        out_FV = mixture.logits_NFV.new_empty((num_fronts, vocab), dtype=self._exact)
        draws.select_logits[(num_fronts, -(-vocab // VOCAB_BLOCK))](
            *(*mixture[:4], kind_F, self._chosen.exit_F, out_FV, kind_F.stride(0), num_fronts, vocab),
            num_blocks=self._config.num_exits,
            has_last=has_last,
            block=VOCAB_BLOCK,
        )
        return out_FV

    def _sample(self, logits_FV: Tensor, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        logits_FV = self._changed(logits_FV[None], inputs, variant, only_argmax=False)[0]
        rows, is_exact = inputs.rows, logits_FV.dtype == torch.float64
        fields = (rows[name] for name in Draw._fields)
        draws.sample_tokens[(len(logits_FV),)](
            *(logits_FV, *fields, *self._chosen, answers_4F[EMITTED], rows["kind"].stride(0), logits_FV.shape[1]),
            mixes=variant.mixes,
            block=VOCAB_BLOCK,
            narrow=tl.float64 if is_exact else tl.float32,
            bits=tl.int64 if is_exact else tl.int32,
        )


def stacked(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.detach() for weight in weights])


def stacked_parameters(modules: list[Any]) -> dict[str, Tensor]:
    names = dict(modules[0].named_parameters()) if modules else {}
    return {name: stacked(module.get_parameter(name) for module in modules) for name in names}
