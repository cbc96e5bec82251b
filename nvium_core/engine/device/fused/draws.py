"""Triton kernels that decide tokens. The reference is `decide` of ../decide.py, with ../sampling.py.

`decisions.py` launches them. A program decides for one front row, whatever its sampling parameters, so a graph serves
every kind of request. Truncation bisects the bits of the least weight kept, as positive floats and their bits have the
same order. Weights are float32, or float64 for float64 logits. Sums of weights are float64.
"""

import triton
import triton.language as tl

from nvium_core.engine.device import decide
from nvium_core.engine.params import DrawKind

ARGMAX, MIXTURE, ORIGINAL = (tl.constexpr(int(kind)) for kind in (DrawKind.ARGMAX, DrawKind.MIXTURE, DrawKind.ORIGINAL))
NO_TOKEN, GOES_ON = tl.constexpr(decide.NO_TOKEN), tl.constexpr(decide.GOES_ON)


@triton.jit
def peak_of(logits, vocab, block: tl.constexpr, narrow: tl.constexpr):
    """The largest logit, and its lowest token. NaN is ignored."""
    top, token = tl.full((), float("-inf"), narrow), tl.full((), 0, tl.int64)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(narrow)
        higher = tl.max(x, 0)
        own = begin + tl.min(tl.where(x == higher, tl.arange(0, block), block), 0)
        token = tl.where(higher > top, own.to(tl.int64), token)
        top = tl.maximum(top, higher)
    return top, token


@triton.jit
def weights_of(logits, at, vocab, peak, divisor, least):
    """Weights in the precision of `peak`."""
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(peak.dtype)
    below = (x - peak) / divisor
    return tl.where((at >= vocab) | (below < least), 0.0, tl.exp(below))


@triton.jit
def mass_from(logits, vocab, peak, divisor, least, floor, is_strict, block: tl.constexpr):
    """Sum and number of the weights that are at least `floor`, or above it if `is_strict`.

    The sum is NaN if a logit is NaN, or all are −inf.
    """
    mass, count = tl.full((), 0, tl.float64), tl.full((), 0, tl.int64)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        weight = weights_of(logits, at, vocab, peak, divisor, least)
        is_out = (at >= vocab) | (weight < floor) | ((weight == floor) & (is_strict != 0))
        is_in = is_out == 0
        mass += tl.sum(tl.where(is_in, weight, 0.0).to(tl.float64), 0)
        count += tl.sum(is_in.to(tl.int64), 0)
    return mass, count


@triton.jit
def least_kept(logits, vocab, peak, divisor, least, low, target, counts: tl.constexpr, block: tl.constexpr):
    """Bisect the bits of the largest weight w, at least `low`, so that the weights from w on reach the target.

    `counts`: the target is a number of weights, otherwise their sum. Return the bits, w, and the sum and the number of
    larger weights.
    """
    high = tl.full((), 1.0, peak.dtype).to(low.dtype, bitcast=True) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        weight = middle.to(peak.dtype, bitcast=True)
        mass, number = mass_from(logits, vocab, peak, divisor, least, weight, 0, block)
        reaches = (number if counts else mass) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    floor = low.to(peak.dtype, bitcast=True)
    above, count = mass_from(logits, vocab, peak, divisor, least, floor, 1, block)
    return low, floor, above, count


@triton.jit
def truncate(logits, vocab, peak, divisor, least, total, top_k, top_p, block: tl.constexpr, bits: tl.constexpr):
    """Return the least weight that top-k and top-p keep, and how many tokens of this weight."""
    low, num_ties = tl.full((), 0, bits), tl.full((), 0, tl.int64) + vocab
    mass = total
    if top_k > 0:
        wanted = tl.minimum(top_k, vocab)
        low, floor, above, count = least_kept(logits, vocab, peak, divisor, least, low, wanted, True, block)
        num_ties = wanted - count
        mass = above + num_ties.to(tl.float64) * floor.to(tl.float64)
    if top_p < 1:
        target = top_p * mass
        of_k = low
        low, floor, above, _ = least_kept(logits, vocab, peak, divisor, least, low, target, False, block)
        each = tl.where(low > 0, floor.to(tl.float64), 1.0)
        missing = tl.maximum(tl.ceil((target - above) / each), 1.0)
        enough = tl.where(low > 0, missing.to(tl.int64), vocab)
        num_ties = tl.where(low == of_k, tl.minimum(num_ties, enough), enough)
    return low.to(peak.dtype, bitcast=True), num_ties


@triton.jit
def kept_weights(logits, begin, vocab, peak, divisor, least, floor, num_ties, seen, block: tl.constexpr):
    """The weights of a block of tokens after truncation, and the number of ties up to its end."""
    at = begin + tl.arange(0, block)
    weight = weights_of(logits, at, vocab, peak, divisor, least)
    is_tie = (weight == floor) & (at < vocab)
    rank = seen + tl.cumsum(is_tie.to(tl.int64), 0)
    kept = tl.where((weight > floor) | (is_tie & (rank <= num_ties)), weight, 0.0)
    return kept, seen + tl.sum(is_tie.to(tl.int64), 0)


@triton.jit
def shifted(x, by: tl.constexpr):
    return x ^ (x >> by)


@triton.jit
def race_times(uniform, at, weight):
    """Exponential variates of `race_numbers`, divided by the weights."""
    key = (uniform * 9007199254740992.0).to(tl.int64).to(tl.uint64)
    x = key + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = shifted(x, 30) * 0xBF58476D1CE4E5B9
    x = shifted(x, 27) * 0x94D049BB133111EB
    number = ((shifted(x, 31) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return tl.where(weight > 0, -tl.log(number) / tl.where(weight > 0, weight, 1.0).to(tl.float64), float("inf"))


@triton.jit
def raced_token(logits, vocab, peak, divisor, least, floor, num_ties, uniform, block: tl.constexpr):
    """The token with the smallest race time."""
    token, seen = tl.full((), NO_TOKEN, tl.int64), tl.full((), 0, tl.int64)
    fastest = tl.full((), float("inf"), tl.float64)
    for begin in range(0, vocab, block):
        kept, seen = kept_weights(logits, begin, vocab, peak, divisor, least, floor, num_ties, seen, block)
        time = race_times(uniform, begin + tl.arange(0, block), kept)
        here = tl.min(time, 0)
        first = begin + tl.min(tl.where(time == here, tl.arange(0, block), block), 0)
        token = tl.where(here < fastest, first.to(tl.int64), token)
        fastest = tl.minimum(fastest, here)
    return token


@triton.jit
def kept_total(logits, vocab, peak, divisor, least, floor, num_ties, block: tl.constexpr):
    total, seen = tl.full((), 0, tl.float64), tl.full((), 0, tl.int64)
    for begin in range(0, vocab, block):
        kept, seen = kept_weights(logits, begin, vocab, peak, divisor, least, floor, num_ties, seen, block)
        total += tl.sum(kept.to(tl.float64), 0)
    return total


@triton.jit
def drawn_token(logits, vocab, peak, divisor, least, floor, num_ties, target, block: tl.constexpr):
    """The first token up to which the weights exceed the target, or the last of positive weight."""
    before, seen = tl.full((), 0, tl.float64), tl.full((), 0, tl.int64)
    found, last = tl.full((), -1, tl.int64), tl.full((), -1, tl.int64)
    for begin in range(0, vocab, block):
        kept, seen = kept_weights(logits, begin, vocab, peak, divisor, least, floor, num_ties, seen, block)
        at = begin + tl.arange(0, block)
        ends = before + tl.cumsum(kept.to(tl.float64), 0)
        beyond = tl.min(tl.where((ends > target) & (kept > 0), at, vocab), 0).to(tl.int64)
        found = tl.where((found < 0) & (beyond < vocab), beyond, found)
        last = tl.maximum(last, tl.max(tl.where(kept > 0, at, -1), 0).to(tl.int64))
        before += tl.sum(kept.to(tl.float64), 0)
    return tl.where(found >= 0, found, last)


@triton.jit
def sample_tokens(
    logits, kind, temperature, log_min_p, top_k, top_p, exits, tokens, uniforms, emitted, stride, vocab,
    mixes: tl.constexpr, block: tl.constexpr, narrow: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Sample each front's token from its logits, unless it goes on or its argmax is known (`mixes`)."""
    front = tl.program_id(0).to(tl.int64)
    own_exit, own_kind = tl.load(exits + front), tl.load(kind + front * stride)
    token = tl.where(own_exit == -1, GOES_ON, NO_TOKEN).to(tl.int64)
    is_known = mixes & (own_kind == ARGMAX)
    if (own_exit >= 0) & is_known:
        token = tl.load(tokens + front)
    elif own_exit >= 0:
        own = logits + front * vocab
        heat, uniform = tl.load(temperature + front * stride), tl.load(uniforms + front)
        divisor = tl.where(heat > 0, heat, 1.0).to(narrow)
        least = tl.load(log_min_p + front * stride).to(narrow)
        k, p = tl.load(top_k + front * stride), tl.load(top_p + front * stride)
        peak, best = peak_of(own, vocab, block, narrow)
        total, _ = mass_from(own, vocab, peak, divisor, least, 0.0, 0, block)
        floor, num_ties = tl.full((), -1.0, narrow), tl.full((), 0, tl.int64)
        is_finite = total < float("inf")  # False for NaN too
        is_argmax = (own_kind == ARGMAX) | ((own_kind == ORIGINAL) & (heat == 0))
        if is_finite & (is_argmax == 0) & ((k > 0) | (p < 1)):
            floor, num_ties = truncate(own, vocab, peak, divisor, least, total, k, p, block, bits)
            total = kept_total(own, vocab, peak, divisor, least, floor, num_ties, block)
        if is_finite & is_argmax:
            token = best
        elif is_finite & (own_kind == ORIGINAL):
            token = raced_token(own, vocab, peak, divisor, least, floor, num_ties, uniform, block)
        elif is_finite:
            token = drawn_token(own, vocab, peak, divisor, least, floor, num_ties, uniform * total, block)
    tl.store(emitted + front, token.to(tl.float64))


@triton.jit(do_not_specialize=["num_fronts"])
def measure_exits(logits, peaks, sums, num_fronts, vocab, block: tl.constexpr):
    """The largest logit of each exit, and the sum of the exponentials below it. Program (front, exit)."""
    front, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = number * num_fronts + front
    own = logits + place * vocab
    peak, _ = peak_of(own, vocab, block, tl.float64)
    total, _ = mass_from(own, vocab, peak, 1.0, float("-inf"), 0.0, 0, block)
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)


@triton.jit
def mixture_of(
    logits, log_w, peaks, sums, at, front, num_fronts, vocab, last,
    num_blocks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Σ p_j π_j(v) over the exits up to `last`, in float64."""
    mixed = tl.zeros([block], tl.float64)
    log_reached = tl.full((), 0, tl.float64)
    for number in tl.static_range(num_blocks):
        if number <= last:
            log_off = tl.full((), 0, tl.float64)
            place = number * num_fronts + front
            if number < num_blocks - 1:
                log_off = tl.load(log_w + 2 * place + 1).to(tl.float64)
            x = tl.load(logits + place * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float64)
            share = tl.exp(log_reached + log_off) / tl.load(sums + place)
            mixed += share * tl.exp(x - tl.load(peaks + place))
            if number < num_blocks - 1:
                log_reached += tl.load(log_w + 2 * place).to(tl.float64)
    return mixed


@triton.jit(do_not_specialize=["num_fronts"])
def rank_mixtures(
    logits, log_w, peaks, sums, best, second, places, num_fronts, vocab,
    num_blocks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The two largest elements of the partial mixture m_k, and the token of the largest. Program (front, exit k)."""
    front, last = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, next_top = tl.full((), float("-inf"), tl.float64), tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0, tl.int64)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        mixed = mixture_of(logits, log_w, peaks, sums, at, front, num_fronts, vocab, last, num_blocks, block)
        mixed = tl.where(at < vocab, mixed, float("-inf"))
        here = tl.max(mixed, 0)
        first = begin + tl.min(tl.where(mixed == here, tl.arange(0, block), block), 0)
        below = tl.max(tl.where(at == first, float("-inf"), mixed), 0)
        next_top = tl.maximum(tl.maximum(next_top, below), tl.minimum(top, here))
        token = tl.where(here > top, first.to(tl.int64), token)
        top = tl.maximum(top, here)
    to = last * num_fronts + front
    tl.store(best + to, top)
    tl.store(second + to, next_top)
    tl.store(places + to, token)


@triton.jit(do_not_specialize=["num_fronts"])
def select_logits(
    logits, log_w, peaks, sums, kind, exits, out, stride, num_fronts, vocab,
    num_blocks: tl.constexpr, has_last: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The logits to sample: log π_mix for `DrawKind.MIXTURE` at the last exit, else those of the front's exit."""
    front = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    if has_last & (tl.load(kind + front * stride) == MIXTURE):
        mixed = mixture_of(logits, log_w, peaks, sums, at, front, num_fronts, vocab, num_blocks - 1, num_blocks, block)
        x = tl.log(mixed)
    else:
        own = tl.maximum(tl.load(exits + front), 0) * num_fronts + front
        x = tl.load(logits + own * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float64)
    tl.store(out + front * vocab + at, x.to(out.dtype.element_ty), mask=at < vocab)


@triton.jit(do_not_specialize=["num_fronts"])
def change_logits(
    logits, out, entries, values, used, kind, stride, num_fronts, vocab,
    only_argmax: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write changed logits to `out`, a copy of the logits: of all fronts, or those of `DrawKind.ARGMAX`.

    Program (block of changes, exit). A change has five words: front, token, repetition, occurrence, bias.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < tl.load(used)
    front = tl.load(entries + 5 * at, mask=inside, other=0)
    token = tl.load(entries + 5 * at + 1, mask=inside, other=0)
    if only_argmax:
        inside = inside & (tl.load(kind + front * stride, mask=inside, other=0) == ARGMAX)
    place = (tl.program_id(1) * num_fronts + front) * vocab + token
    x = tl.load(logits + place, mask=inside, other=0.0).to(tl.float64)
    repetition = tl.load(values + 5 * at + 2, mask=inside, other=1.0)
    x = tl.where(x > 0, x / repetition, x * repetition) - tl.load(values + 5 * at + 3, mask=inside, other=0.0)
    x += tl.load(values + 5 * at + 4, mask=inside, other=0.0)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_fronts"])
def mask_logits(
    out, masks, kind, stride, num_fronts, vocab, num_words,
    only_argmax: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Set the logits of forbidden tokens to −inf: of all fronts, or those of `DrawKind.ARGMAX`.

    Program (front, block of tokens, exit). A word has the bits of 64 tokens.
    """
    front = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    if only_argmax:
        at = tl.where(tl.load(kind + front * stride) == ARGMAX, at, vocab)
    inside = at < vocab
    word = tl.load(masks + front * num_words + at // 64, mask=inside, other=-1)
    is_forbidden = inside & (((word >> (at % 64)) & 1) == 0)
    place = (tl.program_id(2).to(tl.int64) * num_fronts + front) * vocab + at
    tl.store(out + place, tl.full([block], float("-inf"), out.dtype.element_ty), mask=is_forbidden)
