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
def rms_norm(h, weight, width, eps, wide: tl.constexpr):
    """RMSNorm of one row; elements beyond `width` are 0."""
    precise = h.to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(precise * precise, 0) / width + eps)
    return (precise * scale).to(h.dtype) * weight


@triton.jit
def start_rows(
    table, slot, token, source, previous, h_out, x_out, weight, stride, width, eps,
    is_first: tl.constexpr, wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Load each row's embedding (block 0) or its state after the previous block. Normalise it for the first layer."""
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
    scale = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(h_out + row * width + at, h, mask=inside)
    tl.store(x_out + row * width + at, rms_norm(h, scale, width, eps, wide), mask=inside)


@triton.jit
def add_rows(
    h_ref, delta, x_out, weight, states, slot, stride, width, eps,
    keeps: tl.constexpr, norms: tl.constexpr, wide: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Add a layer's output to the residual. Keep the state (`keeps`), and normalise it for what follows (`norms`)."""
    row = tl.program_id(0)
    at = tl.arange(0, size)
    inside = at < width
    h = tl.load(h_ref + row * width + at, mask=inside, other=0.0)
    h = h + tl.load(delta + row * width + at, mask=inside, other=0.0)
    tl.store(h_ref + row * width + at, h, mask=inside)
    if keeps:
        tl.store(states + tl.load(slot + row * stride) * width + at, h, mask=inside)
    if norms:
        scale = tl.load(weight + at, mask=inside, other=0.0)
        tl.store(x_out + row * width + at, rms_norm(h, scale, width, eps, wide), mask=inside)


@triton.jit
def rotate_and_write(
    qkv, keys, values, slot, position, inv_freq, q_norm, k_norm, stride, scaling, eps,
    num_queries: tl.constexpr, num_keys: tl.constexpr, half: tl.constexpr, size: tl.constexpr,
    rotates: tl.constexpr, norms: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Rotate queries in place; write rotated keys, and values, to the cache in its precision.

    Program (row, head) of H + 2G heads.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, size)
    inside = at < half
    own = qkv + (row * (num_queries + 2 * num_keys) + head) * 2 * half
    first = tl.load(own + at, mask=inside, other=0.0)
    second = tl.load(own + half + at, mask=inside, other=0.0)
    place = tl.load(slot + row * stride) * num_keys
    if head < num_queries + num_keys:
        if norms:
            norm = q_norm
            if head >= num_queries:
                norm = k_norm
            a, b = first.to(wide), second.to(wide)
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * half) + eps)
            first = (a * scale).to(first.dtype) * tl.load(norm + at, mask=inside, other=0.0)
            second = (b * scale).to(second.dtype) * tl.load(norm + half + at, mask=inside, other=0.0)
        if rotates:
            angle = tl.load(position + row * stride).to(tl.float32) * tl.load(inv_freq + at, mask=inside, other=0.0)
            cos = (tl.cos(angle) * scaling).to(first.dtype).to(wide)
            sin = (tl.sin(angle) * scaling).to(first.dtype).to(wide)
            a, b = first.to(wide), second.to(wide)
            first, second = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(second.dtype)
    if head < num_queries:
        tl.store(own + at, first, mask=inside)
        tl.store(own + half + at, second, mask=inside)
    else:
        to = keys + (place + head - num_queries) * 2 * half
        if head >= num_queries + num_keys:
            to = values + (place + head - num_queries - num_keys) * 2 * half
        tl.store(to + at, first, mask=inside)
        tl.store(to + half + at, second, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def attend_pages(
    q, keys, values, table, first_query, position, out, partial_out, partial_lse, scale,
    stride, width_of_table, q_stride, num_rows,
    page_size: tl.constexpr, num_keys: tl.constexpr, group: tl.constexpr, head_size: tl.constexpr,
    tile: tl.constexpr, num_queries: tl.constexpr, num_splits: tl.constexpr,
    block: tl.constexpr, padded: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Causal attention of `num_queries` consecutive rows of a run over its pages. Program (tile, key head, split).

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
    length = place + count
    share = tl.cdiv(tl.cdiv(length, num_splits), block) * block
    top = tl.full([tile], float("-inf"), wide)
    total = tl.zeros([tile], wide)
    sums = tl.zeros([tile, padded], wide)
    for begin in range(split * share, tl.minimum(length, (split + 1) * share), block):
        key = begin + tl.arange(0, block)
        known = key < length
        page = tl.load(table + number * width_of_table + key // page_size, mask=known, other=0)
        at_key = ((page * page_size + key % page_size) * num_keys + head)[:, None] * head_size + of_head[None, :]
        used = known[:, None] & is_head[None, :]
        k_tile = tl.load(keys + at_key, mask=used, other=0.0).to(q_tile.dtype)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee", out_dtype=wide) * scale
        score = tl.where(key[None, :] <= (place + query)[:, None], score, float("-inf"))
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
def activate(gate_up, out, inner, wide: tl.constexpr, block: tl.constexpr):
    """silu(gate) · up. Program (row, part of the inner width)."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=inside, other=0.0)
    wide_gate = gate.to(wide)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=inside, other=0.0)
    tl.store(out + row * inner + at, (wide_gate * tl.sigmoid(wide_gate)).to(gate.dtype) * up, mask=inside)
