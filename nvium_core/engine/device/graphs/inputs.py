"""What a Step needs on the device, packed by the host into one buffer and sent in one copy.

The buffer has 8-byte words, whole numbers and float64 side by side: fields of `MAX_ROWS` words each, then the rows'
page tables. Every view of it stays where it is, so a CUDA graph can read it. Rows and fronts are padded to a power of
two; padding writes to the padding slot and sees the null slot.

Shapes: R rows, F fronts, W pages of the longest table, each with its padding.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.layers.backend import tokens_of
from nvium_core.engine.device.paged_cache import PagedCache, positions
from nvium_core.engine.device.sampling import Truncation
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.randomness import TOKEN as TOKEN_DRAW
from nvium_core.engine.schedule.routed_front import front_uniform
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step

MAX_ROWS = 64
"""Rows and fronts there is room for."""

TOKEN, POSITION, SLOT, FRONT_SLOT, TOP_K, UNIFORM, TEMPERATURE, LOG_MIN_P, TOP_P = range(9)
"""Fields in their order; from UNIFORM on they are float64."""

NUM_FIELDS = 9


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """Of a Step's views."""

    num_rows: int
    num_pages: int
    num_fronts: int


class Inputs:
    def __init__(
        self,
        cache: PagedCache,
        *,
        max_pages: int,
        has_one_width: bool,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        """`max_pages`: of any sequence. `has_one_width` makes all tables that long."""
        self._cache = cache
        self._max_pages = max_pages
        self._has_one_width = has_one_width
        device = cache.keys.device
        is_cuda = device.type == "cuda"
        num_words = MAX_ROWS * (NUM_FIELDS + max_pages)
        self.host = torch.zeros(num_words, dtype=torch.long, pin_memory=is_cuda)
        self.device = torch.zeros(num_words, dtype=torch.long, device=device)
        self._whole, self._real = self.host.numpy(), self.host.view(torch.float64).numpy()
        self._sent = make_fence(device)

    def sizes(self, step: Step) -> PaddedSizes:
        """What the Step fits into, if all its runs reached their fronts."""
        longest = max(run.rows.stop for run in step.runs)
        num_pages = power_of_two(-(-longest // self._cache.page_size))
        return PaddedSizes(
            power_of_two(step.num_rows),
            self._max_pages if self._has_one_width else min(num_pages, self._max_pages),
            power_of_two(len(step.runs)),
        )

    def send(self, step: Step, fronts: Items[Sequence], sizes: PaddedSizes) -> None:
        """Pack the Step, and what is drawn for those of its fronts that `fronts` names; send it."""
        self._sent.wait()  # the last Step's numbers have left the host
        self._pack_rows(step, sizes)
        self._pack_fronts(step.block, fronts, sizes.num_fronts)
        num_words = MAX_ROWS * NUM_FIELDS + sizes.num_rows * sizes.num_pages
        self.device[:num_words].copy_(self.host[:num_words], non_blocking=True)
        self._sent.set()

    def whole(self, field: int, count: int) -> Tensor:
        """A field of whole numbers on the device, [count]."""
        return self.device[field * MAX_ROWS : field * MAX_ROWS + count]

    def real(self, field: int, count: int) -> Tensor:
        """A field of float64, [count]."""
        return self.whole(field, count).view(torch.float64)

    def tables(self, sizes: PaddedSizes) -> Tensor:
        """The rows' pages, [R, W]; beyond a sequence's end the null page."""
        first = MAX_ROWS * NUM_FIELDS
        words = self.device[first : first + sizes.num_rows * sizes.num_pages]
        return words.view(sizes.num_rows, sizes.num_pages)

    def truncation(self, num_fronts: int, *, is_ranked: bool) -> Truncation:
        return Truncation(
            self.real(TEMPERATURE, num_fronts),
            self.real(LOG_MIN_P, num_fronts),
            self.whole(TOP_K, num_fronts),
            self.real(TOP_P, num_fronts),
            is_ranked=is_ranked,
        )

    def _pack_rows(self, step: Step, sizes: PaddedSizes) -> None:
        self._pack(TOKEN, tokens_of(step.runs), sizes.num_rows, padding=0)
        self._pack(POSITION, positions(step.runs), sizes.num_rows, padding=0)
        self._pack(SLOT, self._cache.slots(step.runs), sizes.num_rows, padding=self._cache.padding_slot)
        first = MAX_ROWS * NUM_FIELDS
        tables = self._whole[first : first + sizes.num_rows * sizes.num_pages]
        tables = tables.reshape(sizes.num_rows, sizes.num_pages)
        tables[:] = self._cache.null_page
        of_runs = self._cache.tables(step.runs)
        tables[: step.num_rows, : of_runs.shape[1]] = np.repeat(of_runs, [len(run.rows) for run in step.runs], axis=0)

    def _pack_fronts(self, block: int, fronts: Items[Sequence], count: int) -> None:
        draws = [sequence.draw for sequence in fronts]
        own_slots = [slots(s, range(s.num_tokens - 1, s.num_tokens), self._cache.page_size)[0] for s in fronts]
        uniforms = [front_uniform(sequence, block, TOKEN_DRAW) for sequence in fronts]
        self._pack(FRONT_SLOT, own_slots, count, padding=self._cache.padding_slot)
        self._pack(TOP_K, [draw.top_k for draw in draws], count, padding=0)
        self._pack(UNIFORM, uniforms, count, padding=0.0)
        self._pack(TEMPERATURE, [draw.temperature for draw in draws], count, padding=1.0)
        self._pack(LOG_MIN_P, [draw.log_min_p for draw in draws], count, padding=-np.inf)
        self._pack(TOP_P, [draw.top_p for draw in draws], count, padding=1.0)

    def _pack(self, field: int, values: Items[float] | np.ndarray, count: int, *, padding: float) -> None:
        words = self._real if field >= UNIFORM else self._whole
        first = field * MAX_ROWS
        words[first : first + len(values)] = values
        words[first + len(values) : first + count] = padding
