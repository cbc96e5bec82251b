"""Sizes in bytes of the key/value cache, of its pages, and of the buffers for sequences.

A configured size is text: a number with a decimal unit ("512MB", "1.5GB") or a binary unit ("2GiB"), or a share of the
device's memory ("10%"). On a GPU, this is a share of the memory that the weights leave free. On a CPU, it is a share of
the memory that this process may use, which in a container is less than the machine's memory.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.paged_cache import best_page_size
from nvium_core.engine.params import DEFAULT_CACHE_MEMORY, EngineConfig, require
from nvium_core.model.config import NviumConfig

SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(%|[KMGT]i?B)\s*", re.IGNORECASE)

DRAW_COPIES = 8
"""Maximum float64 copies of the distributions that sampling holds in memory: six on a CPU, eight on a GPU."""

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of a key/value cache. `device_bytes` is the result of `device_memory`."""

    num_pages: int
    page_size: int
    num_bytes: int
    device_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        share = self.num_bytes / self.device_bytes
        return f"{self.num_tokens:,} tokens, {self.num_bytes / 1e9:.3g} GB ({share:.1%} of the device's memory)"


def cache_size(config: EngineConfig, model: NviumConfig, context: int, like: torch.Tensor) -> CacheSize:
    """Return the cache's size. `like`: any tensor with the model's device and precision.

    Raise `InvalidRequest` if the size is zero or exceeds the memory.
    """
    page_size = best_page_size(like) if config.page_size is None else config.page_size
    bytes_each = page_bytes(model, page_size, like.dtype)
    budget = DEFAULT_CACHE_MEMORY if config.cache_memory is None else config.cache_memory
    of_seats = seat_bytes(model, config.max_sequences) if like.is_cuda else 0
    affordable = max(0, parse_cache_memory(budget, like.device) - of_seats) // bytes_each
    if config.cache_tokens is not None:
        num_pages = -(-config.cache_tokens // page_size)
    elif config.cache_memory is not None:
        num_pages = affordable
    else:
        num_pages = min(affordable, config.max_sequences * -(-context // page_size))
    message = (
        f"{budget} is too small for one page of {bytes_each:,} bytes and {of_seats:,} bytes for "
        f"{config.max_sequences} sequences"
    )
    require(num_pages >= 1, "cache_memory", message)
    size = CacheSize(num_pages, page_size, num_pages * bytes_each, device_memory(like.device))
    message = f"{num_pages * page_size:,} tokens need {size.num_bytes:,} bytes, more than the device has free"
    require(size.num_bytes + of_seats <= size.device_bytes, "cache_tokens", message)
    return size


def parse_cache_memory(text: str, device: torch.device) -> int:
    """Parse a size in bytes. Raise `InvalidRequest` if it is not a size, is zero, or exceeds the device's memory."""
    parts = SIZE.fullmatch(text)
    example = "must be a size such as 512MB, 2GiB or 10%"
    require(parts is not None, "cache_memory", f"{example}, got {text!r}")
    assert parts is not None
    number, unit, whole = Fraction(parts[1]), parts[2].lower(), device_memory(device)
    base = 1024 if "i" in unit else 1000
    size = int(number * whole / 100 if unit == "%" else number * base ** ("kmgt".index(unit[0]) + 1))
    require(size >= 1, "cache_memory", f"{example}, got {text!r}, which is zero")
    require(size <= whole, "cache_memory", f"must be at most the {whole:,} bytes of {device}, got {text}")
    return size


def device_memory(device: torch.device) -> int:
    """Return the bytes that a GPU has free after loading the weights, or that this process may use on a CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    membership = MEMBERSHIP.read_text(encoding="utf-8") if MEMBERSHIP.exists() else ""
    return min([installed, *control_group_limits(CONTROL_GROUPS, membership)])


def control_group_limits(root: Path, membership: str) -> Iterator[int]:
    """Yield the memory limits of the process's control groups, versions 1 and 2, and of their parents.

    Paths in `membership` that do not exist are skipped, because in a container the groups may be mounted elsewhere.
    """
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            own = Path(group.lstrip("/"))
            files = [top / place / name for place in (own, *own.parents)]
            yield from (int(text) for file in files if file.exists() and (text := file.read_text().strip()).isdigit())


def page_bytes(config: NviumConfig, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page: keys and values in all layers, and hidden states after every block."""
    heads = config.num_key_value_heads or config.num_attention_heads
    numbers_per_row = 2 * config.num_hidden_layers * heads * (config.head_dim or 0)
    numbers_per_row += config.num_exits * config.hidden_size
    return page_size * numbers_per_row * dtype.itemsize


def seat_bytes(config: NviumConfig, max_sequences: int) -> int:
    """Return the GPU bytes that sampling for all sequences takes. All CUDA graphs share this memory."""
    return power_of_two(max_sequences) * config.vocab_size * DRAW_COPIES * torch.float64.itemsize
