"""Triton kernels of a pass over few rows. Each replaces several of PyTorch's, because on a GPU a launch costs 2 µs.

`layers.py` and `attention.py` launch them. A program computes one row, or one head of a row. Sums are float32, or
float64 for float64 inputs. `stride` is the distance in words between the fields of successive rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def wide_of(tensor: Tensor) -> Any:
    """Return Triton's type of sums of the tensor's elements."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


@triton.jit
def rms_norm(x, weight, at, width, eps, wide: tl.constexpr):
    """RMSNorm of the elements `at` of one row or head; those beyond `width` are 0."""
    precise = x.to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(precise * precise, 0) / width + eps)
    return (precise * scale).to(x.dtype) * tl.load(weight + at, mask=at < width, other=0.0)


@triton.jit
def start_rows(
    table, slot, token, source, previous, h_out, x_out, norm, stride, width, eps, scale,
    is_first: tl.constexpr, wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Load each row's embedding times `scale` (block 0), or its state after the previous block. Normalise it for the
    first layer, unless `norm` is None."""
    row = tl.program_id(0)
    if is_first:
        ahead = tl.load(source + row * stride)
        own = tl.load(token + row * stride)
        emitted = tl.load(previous + tl.maximum(ahead, 0)).to(tl.int64)
        place = tl.where(ahead < 0, own, tl.maximum(emitted, 0))
    else:
        place = tl.load(slot + row * stride)
    at = tl.arange(0, size)
    inside = at < width
    h = tl.load(table + place * width + at, mask=inside, other=0.0)
    if is_first:
        h = (h.to(wide) * scale).to(h.dtype)
    tl.store(h_out + row * width + at, h, mask=inside)
    if norm is not None:
        tl.store(x_out + row * width + at, rms_norm(h, norm, at, width, eps, wide), mask=inside)


@triton.jit
def add_rows(
    h_ref, delta_ref, x_out, after, final, before, states, slot, stride, width, eps, scale,
    wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Add what a layer returns, normalised (`after`) and times `scale`, to the residual. Normalise the sum (`final`).
    Keep it in `states`, and normalise it for what follows (`before`). The norms and `states` may be None."""
    row = tl.program_id(0)
    at = tl.arange(0, size)
    inside = at < width
    h = tl.load(h_ref + row * width + at, mask=inside, other=0.0)
    delta = tl.load(delta_ref + row * width + at, mask=inside, other=0.0)
    if after is not None:
        delta = rms_norm(delta, after, at, width, eps, wide)
    h = (h.to(wide) + delta.to(wide) * scale).to(h.dtype)
    if final is not None:
        h = rms_norm(h, final, at, width, eps, wide)
    tl.store(h_ref + row * width + at, h, mask=inside)
    if states is not None:
        tl.store(states + tl.load(slot + row * stride) * width + at, h, mask=inside)
    if before is not None:
        tl.store(x_out + row * width + at, rms_norm(h, before, at, width, eps, wide), mask=inside)


@triton.jit
def norm_and_rotate(
    own, normed, norm, width, position, inv_freq, scaling, eps,
    head_size: tl.constexpr, rotated: tl.constexpr, qk_norm: tl.constexpr,
    size: tl.constexpr, normed_size: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Return a head of queries or keys. The first `rotated` elements are rotated in pairs.

    The `width` elements at `normed`, the head or all heads, are normalised together.
    """
    at = tl.arange(0, size)
    inside = at < head_size
    pair = tl.where(at < rotated // 2, at + rotated // 2, at - rotated // 2)
    x, other = tl.load(own + at, mask=inside, other=0.0), tl.load(own + pair, mask=inside, other=0.0)
    if qk_norm == "head" or qk_norm == "width":  # noqa: PLR1714 (Triton has no sets)
        of_width = tl.arange(0, normed_size)
        precise = tl.load(normed + of_width, mask=of_width < width, other=0.0).to(wide)
        scale = 1.0 / tl.sqrt(tl.sum(precise * precise, 0) / width + eps)
        x = (x.to(wide) * scale).to(x.dtype) * tl.load(norm + at, mask=inside, other=0.0)
        other = (other.to(wide) * scale).to(x.dtype) * tl.load(norm + pair, mask=inside, other=0.0)
    if rotated > 0:
        angle = position.to(tl.float32) * tl.load(inv_freq + tl.minimum(at, pair), mask=at < rotated, other=0.0)
        cos = (tl.cos(angle) * scaling).to(x.dtype).to(wide)
        sin = (tl.sin(angle) * scaling).to(x.dtype).to(wide)
        turned = x.to(wide) * cos + tl.where(at < pair, -other, other).to(wide) * sin
        x = tl.where(at < rotated, turned.to(x.dtype), x)
    if qk_norm == "rotated head":
        x = rms_norm(x, norm, at, head_size, eps, wide)
    return x


@triton.jit
def rotate_and_write(
    qkv, q_out, keys, values, slot, position, inv_freq, q_norm, k_norm, stride, scaling, eps,
    num_queries: tl.constexpr, num_keys: tl.constexpr, head_size: tl.constexpr, rotated: tl.constexpr,
    qk_norm: tl.constexpr, size: tl.constexpr, normed_size: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate queries and keys. Write queries, and write keys and values to the cache in its precision.

    Program (row, head) of H + 2G heads. `normed_size`: number of elements that are normalised together, or more.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, size)
    inside = at < head_size
    of_row = qkv + row * (num_queries + 2 * num_keys) * head_size
    x = tl.load(of_row + head * head_size + at, mask=inside, other=0.0)
    if head < num_queries + num_keys:
        norm, first, count = q_norm, head, 1
        if qk_norm is not None and head >= num_queries:
            norm = k_norm
        if qk_norm == "width":
            first, count = 0, num_queries
            if head >= num_queries:
                first, count = num_queries, num_keys
            norm += (head - first) * head_size
        x = norm_and_rotate(
            of_row + head * head_size, of_row + first * head_size, norm, count * head_size,
            tl.load(position + row * stride), inv_freq, scaling, eps,
            head_size, rotated, qk_norm, size, normed_size, wide,
        )  # fmt: skip
    if head < num_queries:
        tl.store(q_out + (row * num_queries + head) * head_size + at, x, mask=inside)
    else:
        place = tl.load(slot + row * stride) * num_keys
        to = keys + (place + head - num_queries) * head_size
        if head >= num_queries + num_keys:
            to = values + (place + head - num_queries - num_keys) * head_size
        tl.store(to + at, x, mask=inside)


@triton.jit
def limit_and_mask(score, distance, cap, window):
    """Limit scores by `cap`, and mask keys behind a row or in front of its window. `distance`: from a key to a row."""
    if cap is not None:
        score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)  # cap · tanh(score / cap)
    is_seen = distance >= 0
    if window is not None:
        is_seen &= distance < window
    return tl.where(is_seen, score, float("-inf"))


@triton.jit(do_not_specialize=["num_rows"])
def attend_pages(
    q, keys, values, table, first_query, position, out, partial_out, partial_lse, scale, cap, window,
    stride, width_of_table, q_stride, num_rows,
    page_size: tl.constexpr, num_keys: tl.constexpr, group: tl.constexpr, head_size: tl.constexpr,
    tile: tl.constexpr, num_queries: tl.constexpr, num_splits: tl.constexpr,
    block: tl.constexpr, padded: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Causal attention of `num_queries` consecutive rows of a run over its pages. Program (tile, key head, split).

    `cap` and `window` are a call's, or None. Blocks of keys in front of the first row's window are not read.
    `first_query` holds each tile's first row and its number of rows, `position` that row's position. With several
    splits, each writes its part of the keys for `combine`.
    """
    number, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, count = number, tl.full((), 1, tl.int64)
    if num_queries > 1:
        start, count = tl.load(first_query + 2 * number), tl.load(first_query + 2 * number + 1)
    at = tl.arange(0, tile)
    query, member = at // group, at % group
    inside = (query < count) & (query < num_queries)
    place = tl.load(position + number * stride)
    of_head = tl.arange(0, padded)
    is_head = of_head < head_size
    row = (start + query)[:, None]
    wanted = inside[:, None] & is_head[None, :]
    of_query = (head * group + member)[:, None] * head_size + of_head[None, :]
    q_tile = tl.load(q + row * q_stride + of_query, mask=wanted, other=0.0)
    length, first = place + count, 0
    if window is not None:
        first = tl.maximum(place + 1 - window, 0) // block * block
    share = tl.cdiv(tl.cdiv(length - first, num_splits), block) * block
    top = tl.full([tile], float("-inf"), wide)
    total = tl.zeros([tile], wide)
    sums = tl.zeros([tile, padded], wide)
    for begin in range(first + split * share, tl.minimum(length, first + (split + 1) * share), block):
        key = begin + tl.arange(0, block)
        known = key < length
        page = tl.load(table + number * width_of_table + key // page_size, mask=known, other=0)
        at_key = ((page * page_size + key % page_size) * num_keys + head)[:, None] * head_size + of_head[None, :]
        used = known[:, None] & is_head[None, :]
        k_tile = tl.load(keys + at_key, mask=used, other=0.0).to(q_tile.dtype)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee", out_dtype=wide) * scale
        score = limit_and_mask(score, (place + query)[:, None] - key[None, :], cap, window)
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        decay = tl.exp(top - base)
        v_tile = tl.load(values + at_key, mask=used, other=0.0).to(q_tile.dtype)
        total = total * decay + tl.sum(weight, 1)
        sums = sums * decay[:, None] + tl.dot(weight.to(v_tile.dtype), v_tile, input_precision="ieee", out_dtype=wide)
        top = higher
    mean = sums / tl.where(total == 0, 1.0, total)[:, None]
    of_out = (row * (num_keys * group) + (head * group + member)[:, None]) * head_size + of_head[None, :]
    if num_splits == 1:
        tl.store(out + of_out, mean.to(q_tile.dtype), mask=wanted)
    else:
        tl.store(partial_out + split * num_rows * num_keys * group * head_size + of_out, mean, mask=wanted)
        of_lse = (start + query) * (num_keys * group) + head * group + member
        tl.store(
            partial_lse + split * num_rows * num_keys * group + of_lse,
            top + tl.log(tl.where(total == 0, 1.0, total)),
            mask=inside,
        )


@triton.jit(do_not_specialize=["num_heads_of_all"])
def combine(
    partial_out, partial_lse, out, num_heads_of_all,
    head_size: tl.constexpr, num_splits: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of a row."""
    number = tl.program_id(0).to(tl.int64)
    split, of_head = tl.arange(0, num_splits), tl.arange(0, padded)
    lse = tl.load(partial_lse + split * num_heads_of_all + number)
    weight = tl.exp(lse - tl.max(lse, 0))
    at = (split[:, None] * num_heads_of_all + number) * head_size + of_head[None, :]
    part = tl.load(partial_out + at, mask=(of_head < head_size)[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + number * head_size + of_head, mean.to(out.dtype.element_ty), mask=of_head < head_size)


@triton.jit
def activate(
    inner_in, out, inner, activation: tl.constexpr, gated: tl.constexpr, wide: tl.constexpr, block: tl.constexpr
):
    """f(gate) · up, or f(up) without a gate. Program (row, part of the inner width)."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inner
    own = inner_in + row * inner * (1 + gated) + at
    given = tl.load(own, mask=inside, other=0.0)
    x = given.to(wide)
    if activation == "silu":
        x = x * tl.sigmoid(x)
    elif activation == "gelu_pytorch_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 √(2/π): 1 + tanh(y) = 2 sigmoid(2y)
    else:
        x = tl.maximum(x, 0.0) * x
    found = x.to(given.dtype)
    if gated:
        found *= tl.load(own + inner, mask=inside, other=0.0)
    tl.store(out + row * inner + at, found, mask=inside)
