"""Attention for rows in tensors that never move: every row alone over its own pages, as far as its own position.

That makes all shapes functions of the numbers of rows and pages only. Rows of one sequence each read its keys, which
costs little as long as there are few of them. Two ways to the same:
- the flash kernel reads the pages in place; half precision on CUDA only, and pages of multiples of 256;
- keys and values are gathered into a padded tensor; any precision, any device.

Shapes: R rows, W pages of a table, S = W · page size keys, H query heads, G key heads, P head size.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nvium_core.engine.device.layers.attention import HALF, KERNEL_PAGE_SIZE, PagedAttention
from nvium_core.model.llama import Attend, dense_attention

logger = logging.getLogger(__name__)

MOST_GATHERED_KEYS = 65_536
"""Of all rows together, which bounds the memory that gathering takes."""

RowAttention = Callable[[PagedAttention, Tensor, Tensor, Tensor], Attend]
"""(cache, page tables [R, W], positions [R], cache slots [R]) → attention for these rows."""


def gathered(cache: PagedAttention, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    """Keys that a row may not see are the null slot's, so that nobody's NaN can reach it though masked."""
    within_page = torch.arange(cache.page_size, device=table_RW.device)
    slot_RS = (table_RW[:, :, None] * cache.page_size + within_page).flatten(1)
    visible_RS = torch.arange(slot_RS.shape[1], device=table_RW.device) <= position_R[:, None]
    slot_RS = slot_RS.where(visible_RS, cache.null_slot)
    mask_R11S = visible_RS[:, None, None]

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.keys[layer, slot_R] = k_RGP
        cache.values[layer, slot_R] = v_RGP
        k_RGSP = cache.keys[layer, slot_RS].transpose(1, 2)
        v_RGSP = cache.values[layer, slot_RS].transpose(1, 2)
        return dense_attention(q_RHP[:, :, None], k_RGSP, v_RGSP, mask_R11S)[:, :, 0]

    return attend


def in_place(cache: PagedAttention, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    """By the flash kernel. Not split over keys, which in some versions leaves rows unwritten (pytorch#194167)."""
    tables, num_keys_R = table_RW.int(), position_R.int() + 1
    first_query = torch.arange(len(position_R) + 1, dtype=torch.int32, device=position_R.device)
    first_key = torch.cat([first_query[:1], num_keys_R.cumsum(0, dtype=torch.int32)])
    most_keys = table_RW.shape[1] * cache.page_size
    pages = (-1, cache.page_size)

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.keys[layer, slot_R] = k_RGP
        cache.values[layer, slot_R] = v_RGP
        out_RHP = varlen_attn(
            q_RHP,
            cache.keys[layer].unflatten(0, pages),
            cache.values[layer].unflatten(0, pages),
            first_query,
            first_key,
            1,
            most_keys,
            enable_gqa=q_RHP.shape[1] != k_RGP.shape[1],
            seqused_k=num_keys_R,
            block_table=tables,
            num_splits=1,
        )
        assert isinstance(out_RHP, Tensor)
        return out_RHP

    return attend


def best_attention(cache: PagedAttention, num_heads: int) -> RowAttention:
    """In place if the kernel is there, takes these pages and agrees with gathering; else gathered."""
    if cache.keys.device.type != "cuda" or cache.keys.dtype not in HALF:
        return gathered
    if cache.page_size % KERNEL_PAGE_SIZE:
        message = "pages of %d positions are gathered; a page_size of %d, or a multiple, is read in place"
        logger.warning(message, cache.page_size, KERNEL_PAGE_SIZE)
        return gathered
    try:
        agrees = kernel_agrees(cache, num_heads)
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning("attention cannot read pages in place here, so they are gathered: %s", error)
        return gathered
    if not agrees:
        logger.warning("attention that reads pages in place gives wrong results here, so they are gathered")
    return in_place if agrees else gathered


@torch.inference_mode()
def kernel_agrees(cache: PagedAttention, num_heads: int) -> bool:
    """Whether both ways give the same for a few rows of random pages. For an empty cache, which it leaves empty."""
    generator = torch.Generator().manual_seed(0)
    device, page_size = cache.keys.device, cache.page_size
    last_page = cache.null_slot // page_size - 1
    table_RW = torch.tensor([[0], [last_page], [last_page]], device=device)
    position_R = torch.tensor([page_size - 1, page_size // 2, 0], device=device)
    slot_R = torch.full_like(position_R, cache.padding_slot)

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, cache.keys.shape[-1], generator=generator).to(cache.keys)

    q_RHP, k_RGP = random(3, num_heads), random(3, cache.keys.shape[2])
    used = (table_RW[:2] * page_size + torch.arange(page_size, device=device)).flatten()
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = random(len(used), cache.keys.shape[2])
    found, expected = (way(cache, table_RW, position_R, slot_R)(q_RHP, k_RGP, k_RGP, 0) for way in (in_place, gathered))
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = 0
    return torch.allclose(found, expected, rtol=0, atol=0.05)
