"""Sizes in bytes of the key/value cache, of its pages, and of the buffers for sequences.

A configured size is text: a number with a decimal unit ("512MB", "1.5GB") or a binary unit ("2GiB"), or a share of the
device's memory ("10%"). On a GPU, this is a share of the memory that the weights leave free. On a CPU, it is a share of
the memory that this process may use, which in a container is less than the machine's memory.
"""

import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from nvium_core.engine.config import DEFAULT_CACHE_MEMORY, EngineConfig
from nvium_core.engine.device.paged_cache import best_page_size, cache_precision, power_of_two
from nvium_core.engine.errors import require
from nvium_core.model.config import NviumConfig

SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(%|[KMGT]i?B)\s*", re.IGNORECASE)

PREFERRED_BYTES = 200_000_000
"""Memory of a CPU's cache, until requests need more, or miss evicted prefixes."""

PROCESS_BYTES = 300_000_000
"""What a CPU server takes in addition to weights and cache, once it is full: pages of libraries, and buffers."""

LIMITS = ((resource.RLIMIT_AS, 0, 400_000_000, "-v"), (resource.RLIMIT_DATA, 5, 0, "-d"))
"""Limits of the process: kind, column in `PROCESS_PAGES`, bytes that threads only reserve, option of `ulimit`."""

DRAW_COPIES = 8
"""Maximum float64 copies of the distributions that sampling holds in memory: six on a CPU, eight on a GPU."""

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MACHINE_MEMORY = Path("/proc/meminfo")
PROCESS_PAGES = Path("/proc/self/statm")
VERSION_2 = ("memory.max", "memory.current", "memory.stat:inactive_file", "memory.stat:active_file")
CACHED = ("memory.stat:total_inactive_file", "memory.stat:total_active_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", *CACHED)
"""Limit and use of a control group's memory, and what its use has of the page cache."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of a key/value cache. `device_bytes` is the result of `device_memory`.

    num_preferred: pages that the cache uses before it evicts prefixes. A GPU allocates all pages at the start anyway.
    """

    num_pages: int
    num_preferred: int
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
    page_size = config.page_size or best_page_size(like.device)
    bytes_each = page_bytes(model, page_size, like.dtype, cache_precision(config.cache_dtype, like))
    kind, max_sequences = like.device.type, config.bounds(like.device.type).sequences
    default = DEFAULT_CACHE_MEMORY.get(kind, DEFAULT_CACHE_MEMORY["cpu"])
    budget = default if config.cache_memory is None else config.cache_memory
    of_seats = seat_bytes(model, max_sequences) if like.is_cuda else 0
    budget_bytes = parse_cache_memory(budget, like.device)
    if config.cache_memory is None and not like.is_cuda:  # other processes may use most of the machine
        budget_bytes = budget_bytes * free_memory()[0] // device_memory(like.device)
    affordable = max(0, budget_bytes - of_seats) // bytes_each
    if config.cache_tokens is not None:
        num_pages = -(-config.cache_tokens // page_size)
    elif config.cache_memory is not None:
        num_pages = affordable
    else:
        num_pages = min(affordable, max_sequences * -(-context // page_size))
    message = (
        f"{budget} is too small for one page of {bytes_each:,} bytes and {of_seats:,} bytes for "
        f"{max_sequences} sequences"
    )
    require(num_pages >= 1, "cache_memory", message)
    num_preferred = num_pages if like.is_cuda else PREFERRED_BYTES // bytes_each
    size = CacheSize(num_pages, num_preferred, page_size, num_pages * bytes_each, device_memory(like.device))
    message = f"{num_pages * page_size:,} tokens need {size.num_bytes:,} bytes, more than the device has free"
    require(size.num_bytes + of_seats <= size.device_bytes, "cache_tokens", message)
    return size


def parse_cache_memory(text: str, device: torch.device) -> int:
    """Parse a size in bytes. Raise `InvalidRequest` if it is not a size, is zero, or exceeds the device's memory."""
    parts = SIZE.fullmatch(text)
    example = "must be a size such as 512MB, 2GiB or 10%"
    require(parts is not None, "cache_memory", f"{example}, got {text!r}")
    assert parts is not None
    number, unit, available = Fraction(parts[1]), parts[2].lower(), device_memory(device)
    base = 1024 if "i" in unit else 1000
    size = int(number * available / 100 if unit == "%" else number * base ** ("kmgt".index(unit[0]) + 1))
    require(size >= 1, "cache_memory", f"{example}, got {text!r}, which is zero")
    require(size <= available, "cache_memory", f"must be at most the {available:,} bytes of {device}, got {text}")
    return size


def device_memory(device: torch.device) -> int:
    """Return the bytes that a GPU has free after loading the weights, or that this process may use on a CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit, _ in control_groups(CONTROL_GROUPS, membership())]
    return min([installed, *limits, *(limit for limit, *_ in process_limits())])


def free_memory(reserved: int = 0) -> tuple[int, str]:
    """Return the bytes that this process may still use on a CPU, and whose limit this is.

    reserved: bytes that are allocated, but not yet written. Only the limits of the process count them as used.
    """
    fields = MACHINE_MEMORY.read_text(encoding="utf-8").split() if MACHINE_MEMORY.exists() else []
    free = int(fields[fields.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in fields else sys.maxsize
    groups = control_groups(CONTROL_GROUPS, membership())
    own = ((limit + reserved - used, f"the limit of ulimit {option}") for limit, used, option in process_limits())
    return min([(free, "the machine's"), *((limit - used, "the container's limit") for limit, used in groups), *own])


def check_memory(weights: int, cache: int) -> None:
    """Raise `InvalidRequest` if what a full engine will take exceeds the free memory. The cache must be allocated."""
    free, whose = free_memory(reserved=cache)
    needed = weights + cache + PROCESS_BYTES
    sizes = {"weights": weights, "cache": cache, "process": PROCESS_BYTES}
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
    message = (
        f"the model needs {needed / 1e9:.2f} GB ({parts}), {max(0, free) / 1e9:.2f} GB available ({whose}); try a "
        "smaller cache_memory, or a file with fewer bits per weight"
    )
    require(needed <= free, "cache_memory", message)


def process_limits() -> Iterator[tuple[int, int, str]]:
    """Yield limit and used bytes of the process's address space and of its data, and the option of `ulimit`."""
    pages = PROCESS_PAGES.read_text(encoding="utf-8").split() if PROCESS_PAGES.exists() else []
    for kind, column, unwritten, option in LIMITS if pages else ():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield limit, int(pages[column]) * resource.getpagesize() + unwritten, option


def membership() -> str:
    return MEMBERSHIP.read_text(encoding="utf-8") if MEMBERSHIP.exists() else ""


def control_groups(root: Path, membership: str) -> Iterator[tuple[int, int]]:
    """Yield memory limit and used bytes of the process's control groups, versions 1 and 2, and of their parents.

    Paths in `membership` that do not exist are skipped, because in a container the groups may be mounted elsewhere.
    Files in the page cache do not count as used.
    """
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            top, names = (root / "memory", VERSION_1) if controllers else (root, VERSION_2)
            own = Path(group.lstrip("/"))
            for place in (own, *own.parents):
                limit, used, *cached = (_number(top / place, name) for name in names)
                if limit is not None:
                    yield limit, max(0, (used or 0) - sum(each or 0 for each in cached))


def _number(group: Path, name: str) -> int | None:
    """Return the number in a file of a control group, or after a name in `memory.stat`. None if there is no number."""
    file, _, row = name.partition(":")
    if not (group / file).exists():
        return None
    words = (group / file).read_text(encoding="utf-8").split()
    text = words[words.index(row) + 1] if row in words else "" if row else words[0]
    return int(text) if text.isdigit() else None


def page_bytes(config: NviumConfig, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """Return the bytes of one page: keys and values of all layer calls, and hidden states after every block.

    cache_dtype: precision of keys and values.
    """
    heads = config.num_key_value_heads or config.num_attention_heads
    bytes_per_row = 2 * config.num_calls * heads * (config.head_dim or 0) * cache_dtype.itemsize
    bytes_per_row += config.num_exits * config.hidden_size * dtype.itemsize
    return page_size * bytes_per_row


def seat_bytes(config: NviumConfig, max_sequences: int) -> int:
    """Return the GPU bytes that sampling for all sequences takes. All CUDA graphs share this memory."""
    return power_of_two(max_sequences) * config.vocab_size * DRAW_COPIES * torch.float64.itemsize
