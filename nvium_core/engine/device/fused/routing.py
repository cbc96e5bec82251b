"""Triton kernels of routing: norms of the exits, the ends of routers, the exit of a front, and the inputs of the head.

`decisions.py` launches them. The reference is `decide` of ../decide.py.
"""

import triton
import triton.language as tl

from nvium_core.engine.device.fused.draws import ARGMAX, GOES_ON, NO_TOKEN, ORIGINAL
from nvium_core.engine.device.fused.kernels import normalised
from nvium_core.engine.device.sampling import CERTAINTY_MARGIN

MARGIN = tl.constexpr(CERTAINTY_MARGIN)


@triton.jit(do_not_specialize=["num_fronts"])
def normalise_exits(
    states, slot, weight, x_out, router_out, stride, num_slots, num_fronts, width, eps, num_routed,
    wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Normalise a front's state at an exit. Program (front, exit). Routers, if any, get a copy in their precision."""
    front, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, size)
    inside = at < width
    h = tl.load(states + (number * num_slots + tl.load(slot + front * stride)) * width + at, mask=inside, other=0.0)
    x = normalised(h, tl.load(weight + number * width + at, mask=inside, other=0.0), width, eps, wide)
    to = (number * num_fronts + front) * width + at
    tl.store(x_out + to, x, mask=inside)
    if number < num_routed:
        tl.store(router_out + to, x, mask=inside)


@triton.jit(do_not_specialize=["num_fronts"])
def route(
    y, norm, head, bias, log_w, num_fronts, width, eps, temperature,
    wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """The end of a router: norm, head and log softmax. Program (front, exit); `log_w` is [exits, fronts, 2]."""
    front, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, size)
    inside = at < width
    own = tl.load(y + (number * num_fronts + front) * width + at, mask=inside, other=0.0)
    x = normalised(own, tl.load(norm + number * width + at, mask=inside, other=0.0), width, eps, wide).to(wide)
    goes_on = tl.sum(x * tl.load(head + 2 * number * width + at, mask=inside, other=0.0), 0)
    leaves = tl.sum(x * tl.load(head + (2 * number + 1) * width + at, mask=inside, other=0.0), 0)
    goes_on = (goes_on + tl.load(bias + 2 * number)) / temperature
    leaves = (leaves + tl.load(bias + 2 * number + 1)) / temperature
    top = tl.maximum(goes_on, leaves)
    both = top + tl.log(tl.exp(goes_on - top) + tl.exp(leaves - top))
    to = log_w + 2 * (number * num_fronts + front)
    tl.store(to, goes_on - both)
    tl.store(to + 1, leaves - both)


@triton.jit(do_not_specialize=["num_fronts"])
def choose_exits(
    log_w, kind, first, uniform, best, second, place, answers, exits, tokens, uniforms,
    num_fronts, stride, uniform_stride, answer_stride,
    start: tl.constexpr, stop: tl.constexpr, num_blocks: tl.constexpr, base: tl.constexpr, mixes: tl.constexpr,
):  # fmt: skip
    """Choose a front's exit. `exits`: the exit, −1 without, −2 for NaN. `tokens`: the mixture's argmax, if `mixes`.

    `log_w` begins at exit `base`. `best`, `second` and `place` are `rank_mixtures`'.
    """
    front = tl.program_id(0)
    own_kind, own_first = tl.load(kind + front * stride), tl.load(first + front * stride)
    chosen = tl.full((), -1, tl.int64)
    is_sane = chosen < 0
    token = tl.full((), GOES_ON, tl.int64)
    log_continue = tl.full((), 0, tl.float64)
    log_mixed, log_p, drawn = log_continue, log_continue, log_continue
    for block in tl.static_range(base, stop):
        log_on, log_off = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.float64)
        if block < num_blocks - 1:
            at = log_w + 2 * ((block - base) * num_fronts + front)
            log_on, log_off = tl.load(at).to(tl.float64), tl.load(at + 1).to(tl.float64)
        log_mixed += log_on
        if block >= start:
            takes = (own_kind == 0) & (
                tl.load(uniform + front * stride + (num_blocks + block) * uniform_stride) < tl.exp(log_off)
            )
            if block == num_blocks - 1:
                takes = takes | (own_kind != 0)
            is_finite = (log_on + log_off) == (log_on + log_off)
            if mixes:
                own = block * num_fronts + front
                top = tl.load(best + own)
                gap = top - tl.load(second + own)
                takes = takes | ((own_kind == ARGMAX) & (gap > tl.exp(log_mixed) + MARGIN))
                is_number = tl.abs(top) < float("inf")
                token = tl.where(chosen == -1, tl.where(is_number, tl.load(place + own), NO_TOKEN), token)
            is_here = (chosen == -1) & (own_first <= block)
            takes = (takes | ((is_finite == 0) & (own_kind != ORIGINAL))) & is_here
            is_sane = tl.where(takes, is_finite, is_sane)
            drawn = tl.where(takes, tl.load(uniform + front * stride + block * uniform_stride), drawn)
            log_p = tl.where(takes & (own_kind != ORIGINAL), log_continue + log_off, log_p)
            log_continue = tl.where(is_here, log_continue + log_on, log_continue)
            chosen = tl.where(takes, block, chosen)
    tl.store(answers + front, chosen.to(tl.float64))
    tl.store(answers + 2 * answer_stride + front, log_p)
    tl.store(answers + 3 * answer_stride + front, log_continue)
    tl.store(exits + front, tl.where((chosen >= 0) & (is_sane == 0), -2, chosen))
    tl.store(tokens + front, token)
    tl.store(uniforms + front, drawn)


@triton.jit(do_not_specialize=["num_fronts"])
def select_outputs(
    x, delta, exits, out, num_fronts, width, base,
    has_delta: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The head's input x + adapter(x) at the front's exit."""
    front = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    number = tl.maximum(tl.load(exits + front) - base, 0)
    o = tl.load(x + (number * num_fronts + front) * width + at, mask=inside, other=0.0)
    if has_delta:
        o += tl.load(delta + (number * num_fronts + front) * width + at, mask=inside, other=0.0)
    tl.store(out + front * width + at, o, mask=inside)
