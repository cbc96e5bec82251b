"""Decides after a pass which front rows emit, with Triton kernels. The reference is `decide` of ../decide.py.

Routers come first, those of all exits in one product. The head multiplies one row per front, that of the exit taken.
Only `Kind.ARGMAX` and `Kind.MIXTURE` need the head at every exit.

Shapes: F fronts, K exits with a router, N exits, D width, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN, change_of
from nvium_core.engine.device.fused import draws, routing
from nvium_core.engine.device.fused.launch import launch, wide_of
from nvium_core.engine.device.inputs import InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.params import Draw, Kind
from nvium_core.model.exits import Adapter, Exit, Router
from nvium_core.model.nvium import Nvium

VOCAB_BLOCK, WIDTH_BLOCK = 1024, 512


class Chosen(NamedTuple):
    """exit_F: the exit taken, −1 for none, −2 for NaN. argmax_F: the mixture's. uniform_F: the number to draw with."""

    exit_F: Tensor
    argmax_F: Tensor
    uniform_F: Tensor


class Mixture(NamedTuple):
    """What every exit says. logits [N, F, V]; log_w [K, F, 2]; per exit and front the largest logit and the sum of the
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
        routers = [each.router for each in exits if isinstance(each.router, Router)]
        self._routers = {name: weight.to(self._exact) for name, weight in stacked_parameters(routers).items()}
        self._adapters = stacked_parameters([each.adapter for each in exits if isinstance(each.adapter, Adapter)])

    def decide(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        """Write `decide`'s answers for the fronts."""
        used = range(0 if variant.mixes else blocks.start, blocks.stop)
        x_NFD, log_w_KF2 = self._route(used, inputs)
        mixture = self._mixture(x_NFD, log_w_KF2, inputs, variant) if variant.mixes else None
        chosen = self._choose(blocks, used.start, log_w_KF2, mixture, inputs, answers_4F)
        if mixture is None:
            logits_FV = self._model.lm_head(self._outputs(used, x_NFD, chosen.exit_F))
        else:
            logits_FV = self._selected(mixture, chosen, inputs, has_last=blocks.stop == self._config.num_exits)
        if variant.num_changes or variant.has_masks:
            logits_FV = logits_FV.to(torch.promote_types(logits_FV.dtype, torch.float32))
            logits_FV = change_of(inputs, variant, self._config.vocab_size)(logits_FV)
        self._sample(logits_FV, chosen, inputs, answers_4F[EMITTED])

    def _route(self, used: range, inputs: InputViews) -> tuple[Tensor, Tensor]:
        """Return the normalised states of the exits, and log w of those with a router."""
        states, config, routers = self._cache.states_NSD, self._config, self._routers
        routed = range(used.start, min(used.stop, config.num_exits - 1))
        slot_F, width = inputs.rows["front_slot"], config.hidden_size
        x_NFD = states.new_empty(len(used), len(slot_F), width)
        x_KFD = states.new_empty((len(routed), len(slot_F), width), dtype=self._exact)
        log_w_KF2 = states.new_empty((len(routed), len(slot_F), 2), dtype=self._exact)
        sizes = (slot_F.stride(0), states.shape[1], len(slot_F), width, config.rms_norm_eps, len(routed))
        tensors = (states[used.start :], slot_F, self._norm_ND[used.start :], x_NFD, x_KFD)
        grid, size = (len(slot_F), len(used)), power_of_two(width)
        launch(routing.normalise_exits, grid, *tensors, *sizes, wide=wide_of(states), size=size)
        if routed:
            own = {name: weight[routed.start : routed.stop] for name, weight in routers.items()}
            y_KFI = torch.baddbmm(own["fc1.bias"][:, None], x_KFD, own["fc1.weight"].mT)
            y_KFD = torch.baddbmm(own["fc2.bias"][:, None], F.gelu(y_KFI), own["fc2.weight"].mT)
            parts = (own["norm.weight"], own["head.weight"], own["head.bias"], log_w_KF2)
            last = (len(slot_F), width, config.rms_norm_eps, config.router_temperature)
            grid = (len(slot_F), len(routed))
            launch(routing.route, grid, y_KFD, *parts, *last, wide=wide_of(y_KFD), size=size)
        return x_NFD, log_w_KF2

    def _outputs(self, used: range, x_NFD: Tensor, exit_F: Tensor | None) -> Tensor:
        """Return the head's inputs: of each front's exit [F, D], or without `exit_F` of all exits [N, F, D]."""
        delta_NFD = x_NFD
        if self._adapters:
            own = {name: weight[used.start : used.stop] for name, weight in self._adapters.items()}
            delta_NFD = F.silu(x_NFD @ own["up.weight"].mT) @ own["down.weight"].mT
        elif exit_F is None or len(used) == 1:
            return x_NFD if exit_F is None else x_NFD[0]
        num_exits, num_fronts, width = x_NFD.shape
        selects = exit_F is not None
        o_XD = torch.empty_like(x_NFD[0] if selects else x_NFD)
        grid = (num_fronts, -(-width // WIDTH_BLOCK), 1 if selects else num_exits)
        tensors = (x_NFD, delta_NFD, x_NFD if exit_F is None else exit_F, o_XD)
        flags = {"selects": selects, "has_delta": bool(self._adapters), "block": WIDTH_BLOCK}
        launch(routing.add_outputs, grid, *tensors, num_fronts, width, used.start, **flags)
        return o_XD

    def _choose(
        self,
        blocks: range,
        base: int,
        log_w_KF2: Tensor,
        mixture: Mixture | None,
        inputs: InputViews,
        answers_4F: Tensor,
    ) -> Chosen:
        rows, uniform = inputs.rows, inputs.rows["uniform"]
        num_fronts = len(rows["kind"])
        exit_F, argmax_F = (torch.empty_like(rows["kind"], memory_format=torch.contiguous_format) for _ in range(2))
        uniform_F = torch.empty(num_fronts, dtype=torch.float64, device=uniform.device)
        ranks = (exit_F, exit_F, exit_F) if mixture is None else mixture[-3:]
        launch(
            routing.choose_exits,
            (num_fronts,),
            *(log_w_KF2, rows["kind"], rows["first"], uniform, *ranks, answers_4F[EXIT_TAKEN]),
            *(exit_F, argmax_F, uniform_F, num_fronts, rows["kind"].stride(0), uniform.stride(2), answers_4F.stride(0)),
            start=blocks.start,
            stop=blocks.stop,
            num_blocks=self._config.num_exits,
            base=base,
            mixes=mixture is not None,
        )
        return Chosen(exit_F, argmax_F, uniform_F)

    def _mixture(self, x_NFD: Tensor, log_w_KF2: Tensor, inputs: InputViews, variant: Variant) -> Mixture:
        logits_NFV = self._model.lm_head(self._outputs(range(len(x_NFD)), x_NFD, None))
        num_exits, num_fronts, vocab = logits_NFV.shape
        judged_NFV = self._adjusted(logits_NFV, inputs, variant)
        peak_NF, sum_NF, best_NF, second_NF = (
            torch.empty(num_exits, num_fronts, dtype=torch.float64, device=x_NFD.device) for _ in range(4)
        )
        token_NF = torch.empty_like(peak_NF, dtype=torch.long)
        grid = (num_fronts, num_exits)
        launch(draws.measure_exits, grid, judged_NFV, peak_NF, sum_NF, num_fronts, vocab, block=VOCAB_BLOCK)
        measured = (judged_NFV, log_w_KF2, peak_NF, sum_NF)
        launch(
            draws.rank_mixtures,
            grid,
            *(*measured, best_NF, second_NF, token_NF, num_fronts, vocab),
            num_blocks=self._config.num_exits,
            block=VOCAB_BLOCK,
        )
        return Mixture(*measured, best_NF, second_NF, token_NF)

    def _adjusted(self, logits_NFV: Tensor, inputs: InputViews, variant: Variant) -> Tensor:
        """Apply g to the logits of `Kind.ARGMAX`, at every exit."""
        if not (variant.num_changes or variant.has_masks):
            return logits_NFV
        change = change_of(inputs, variant, self._config.vocab_size)
        is_argmax_F1 = (inputs.rows["kind"] == Kind.ARGMAX)[:, None]
        exact_NFV = logits_NFV.to(torch.promote_types(logits_NFV.dtype, torch.float32))
        return torch.stack([torch.where(is_argmax_F1, change(each.clone()), each) for each in exact_NFV])

    def _selected(self, mixture: Mixture, chosen: Chosen, inputs: InputViews, *, has_last: bool) -> Tensor:
        num_fronts, vocab = mixture.logits_NFV.shape[1:]
        kind_F = inputs.rows["kind"]
        out_FV = mixture.logits_NFV.new_empty((num_fronts, vocab), dtype=self._exact)
        launch(
            draws.select_logits,
            (num_fronts, -(-vocab // VOCAB_BLOCK)),
            *(*mixture[:4], kind_F, chosen.exit_F, out_FV, kind_F.stride(0), num_fronts, vocab),
            num_blocks=self._config.num_exits,
            has_last=has_last,
            block=VOCAB_BLOCK,
        )
        return out_FV

    def _sample(self, logits_FV: Tensor, chosen: Chosen, inputs: InputViews, emitted_F: Tensor) -> None:
        rows, is_exact = inputs.rows, logits_FV.dtype == torch.float64
        fields = (rows[name] for name in Draw._fields)
        launch(
            draws.sample_tokens,
            (len(logits_FV),),
            *(logits_FV, *fields, *chosen, emitted_F, rows["kind"].stride(0), logits_FV.shape[1]),
            block=VOCAB_BLOCK,
            narrow=tl.float64 if is_exact else tl.float32,
            bits=tl.int64 if is_exact else tl.int32,
            bits_of_1=0x3FF0000000000000 if is_exact else 0x3F800000,
        )


def stacked(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.detach() for weight in weights])


def stacked_parameters(modules: list[Any]) -> dict[str, Tensor]:
    """Stack the parameters of like modules, by name."""
    names = dict(modules[0].named_parameters()) if modules else {}
    return {name: stacked(module.get_parameter(name) for module in modules) for name in names}
