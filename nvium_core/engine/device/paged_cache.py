"""The tensors of the key/value cache and of hidden states.

The cache stores each row's hidden state after every block that the row has passed. So a Step can be retried, because it
never overwrites its own inputs. And a row that has passed every block can be scored.

Shapes: L layer calls, S cache slots, B runs, Q rows of the longest run, H query heads, G key heads, P head size,
D width, R rows, W pages of the longest table, N blocks.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import chain, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvium_core.choices import CachePrecision
from nvium_core.engine.errors import require
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig
from nvium_core.model.plan import LayerCall

CACHE_LINE = 64  # bytes

Integers = NDArray[np.int64]

Read = Callable[[Tensor, LayerCall], Tensor]
"""(queries [R, H, P], call) → attention to the cached keys, [R, H, P]."""


def best_page_size(device: torch.device) -> int:
    """Return the default page size. A GPU gets the page tables of all rows in every pass, so its pages are large."""
    return 256 if device.type == "cuda" else 16


def cache_precision(choice: CachePrecision, like: Tensor) -> torch.dtype:
    """Return the precision of keys and values. `like`: any tensor of the model. Raise `InvalidRequest` for float64."""
    if choice == "auto":
        return like.dtype
    require(like.dtype != torch.float64, "cache_dtype", f"must be auto for a model in float64, got {choice}")
    named: torch.dtype = getattr(torch, choice)
    return named


SPARE_SLOTS = 16
"""Slots behind the pages: a null and a padding slot, and what a vector may read behind the last page."""


class PagedCache:
    """The tensors `keys` and `values` [L, S, G, P], and `states_NSD`.

    The native backend orders the same memory by pages (call.h).
    """

    def __init__(
        self, config: NviumConfig, *, num_pages: int, page_size: int, like: Tensor, choice: CachePrecision = "auto"
    ) -> None:
        """`like` determines device and precision, but `choice` that of keys and values, which are rounded once."""
        self.page_size = page_size
        self.null_page = num_pages
        self.null_slot = num_pages * page_size
        """First slot of the null page, which pads page tables. Its keys are zeros."""
        self.padding_slot = self.null_slot + 1
        """Padding rows write to this slot. It is never read."""
        self.num_slots = (num_pages + -(-SPARE_SLOTS // page_size)) * page_size
        """Total slots: a multiple of the page size, because kernels require that."""
        heads = config.num_key_value_heads or config.num_attention_heads
        shape = (config.num_calls, self.num_slots, heads, config.head_dim or 0)
        cached = torch.empty(0, dtype=cache_precision(choice, like), device=like.device)
        self.keys = untouched_zeros(shape, cached)
        self.values = untouched_zeros(shape, cached)
        self.states_NSD = untouched_zeros((config.num_exits, self.num_slots, config.hidden_size), like)

    @property
    def precision(self) -> str:
        return str(self.keys.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.states_NSD.nbytes

    def write(self, layer: int, slot_R: Tensor, k_RGP: Tensor, v_RGP: Tensor) -> None:
        self.keys[layer, slot_R] = k_RGP.to(self.keys.dtype)
        self.values[layer, slot_R] = v_RGP.to(self.values.dtype)

    def tables(self, runs: Items[Rows]) -> Integers:
        """Return each run's pages up to its last row, [B, W], padded with the null page."""
        tables = (run.sequence.pages[: -(-run.rows.stop // self.page_size)] for run in runs)
        return np.array([*zip_longest(*tables, fillvalue=self.null_page)], np.int64).reshape(-1, len(runs)).T

    def slots(self, runs: Items[Rows]) -> Integers:
        """Return the cache slots of all rows of the runs, [R]."""
        run_R, position_R = np.repeat(np.arange(len(runs)), [len(run.rows) for run in runs]), positions(runs)
        return self.slots_in(self.tables(runs)[run_R, position_R // self.page_size], position_R)

    def slots_in(self, page_R: Integers, position_R: Integers) -> Integers:
        return page_R * self.page_size + position_R % self.page_size


def positions(runs: Items[Rows]) -> Integers:
    """Return the positions of all rows of the runs, [R]."""
    return np.fromiter(chain.from_iterable(run.rows for run in runs), np.int64)


def upload(words: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for the copy. PyTorch keeps the pinned memory until the copy is done."""
    return (words.pin_memory() if device.type == "cuda" else words).to(device, non_blocking=True)


def upload_all(device: torch.device, *arrays: Integers) -> list[Tensor]:
    packed = upload(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def untouched_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros. On a CPU, they take physical memory only when they are written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return zeros(math.prod(shape) * like.dtype.itemsize).view(like.dtype).view(shape)


def zeros(num_bytes: int) -> Tensor:
    """Return zero bytes that start at a cache line. Unlike PyTorch's zeros, they take memory only when written.

    NumPy asks the system for huge pages, so that reads miss the TLB less often.
    """
    piece = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, np.uint8))
    start = -piece.data_ptr() % CACHE_LINE
    return piece[start : start + num_bytes]
