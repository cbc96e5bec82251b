"""What a Step or a pass needs on the device, packed by the host into one buffer and sent in one copy.

The buffer has 8-byte words, whole numbers and float64 side by side: fields of `MAX_ROWS` words each, then the rows'
page tables. Every view of it stays where it is, so a CUDA graph can read it. Rows and fronts are padded to a power of
two; padding writes to the padding slot and sees the null slot.

Shapes: R rows, F fronts, W pages of the longest table, each with its padding; N blocks.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.graphs.seat_tables import SeatTables
from nvium_core.engine.device.layers.backend import tokens_of
from nvium_core.engine.device.native import native_library
from nvium_core.engine.device.native.uniforms import uniforms
from nvium_core.engine.device.paged_cache import PagedCache, positions
from nvium_core.engine.device.sampling import MANY_CANDIDATES, Truncation
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.randomness import TOKEN as TOKEN_DRAW
from nvium_core.engine.schedule.routed_front import front_uniform
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step

MAX_ROWS = 512
"""Rows and fronts there is room for."""

TOKEN, POSITION, SLOT, FRONT_SLOT, TOP_K, SOURCE, TEMPERATURE, LOG_MIN_P, TOP_P, UNIFORM = range(10)
"""Fields in their order; from TEMPERATURE on they are float64. N fields of uniforms are for tokens drawn behind each
block, and N further ones for routing there."""

MIN_WIDTH, WIDTH_RATIO = 8, 4
"""Pages of a table, where attention reads them in place: so many, or so many times as many, and so on."""


def num_fields(num_blocks: int) -> int:
    return UNIFORM + 2 * num_blocks


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
        num_blocks: int,
        max_pages: int,
        has_few_widths: bool,
        num_candidates: int = MANY_CANDIDATES,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        """`max_pages`: of any sequence. `has_few_widths`: tables may be longer than needed. `num_candidates`: among
        which tokens are ranked."""
        self._cache = cache
        self._num_candidates = num_candidates
        self._num_blocks = num_blocks
        self._max_pages = max_pages
        self._has_few_widths = has_few_widths
        self._first_table = MAX_ROWS * num_fields(num_blocks)
        device = cache.keys.device
        is_cuda = device.type == "cuda"
        num_words = self._first_table + MAX_ROWS * max_pages
        self.host = torch.zeros(num_words, dtype=torch.long, pin_memory=is_cuda)
        self.device = torch.zeros(num_words, dtype=torch.long, device=device)
        self._whole, self._real = self.host.numpy(), self.host.view(torch.float64).numpy()
        self._fields = self._real[: self._first_table].reshape(-1, MAX_ROWS)
        self._tables = SeatTables(max_pages, cache.null_page)
        self._library = native_library()
        self.make_fence = make_fence
        self._sent = make_fence(device)

    def sizes(self, step: Step) -> PaddedSizes:
        """What the Step fits into, if all its runs reached their fronts."""
        width = self.width(max([run.rows.stop for run in step.runs]))
        return PaddedSizes(power_of_two(step.num_rows), width, power_of_two(len(step.runs)))

    def width(self, num_positions: int) -> int:
        """Pages of tables that hold so many positions, with padding."""
        num_pages = -(-num_positions // self._cache.page_size)
        return next(width for width in self.widths if width >= num_pages)

    @property
    def widths(self) -> list[int]:
        """Of all tables there may be."""
        first, ratio = (MIN_WIDTH, WIDTH_RATIO) if self._has_few_widths else (1, 2)
        widths = [first]
        while widths[-1] < self._max_pages:
            widths.append(widths[-1] * ratio)
        return [*(width for width in widths if width < self._max_pages), self._max_pages]

    def send(self, step: Step, fronts: Items[Sequence], sizes: PaddedSizes) -> None:
        """Pack the Step, and what is drawn for those of its fronts that `fronts` names; send it."""
        self._sent.wait()  # the last Step's numbers have left the host
        self._pack(TOKEN, tokens_of(step.runs), sizes.num_rows, padding=0)
        self._pack_rows(step, sizes)
        self._pack_fronts(step.block, fronts, sizes.num_fronts)
        self._send(sizes)

    def send_pass(self, step: Step, sources: Items[int], sizes: PaddedSizes) -> None:
        """A row of each sequence for all blocks. Where `sources` is not negative, its token is what the last pass drew
        in that row."""
        self._sent.wait()
        fronts, count = [(sequence, rows.start) for sequence, rows, _ in step.runs], sizes.num_rows
        tokens = [0 if s >= 0 else each.token_ids[t] for (each, t), s in zip(fronts, sources, strict=True)]
        self._pack(TOKEN, tokens, count, padding=0)
        self._pack(SOURCE, sources, count, padding=-1)
        self._pack_rows(step, sizes)
        self._pack_draws([sequence for sequence, _ in fronts], count)
        keys = ((sequence.seed, sequence.choice, t) for sequence, t in fronts)
        self._fields[UNIFORM:, : len(fronts)] = uniforms(self._library, keys, self._num_blocks)
        self._fields[UNIFORM:, len(fronts) : count] = 0
        self._send(sizes)

    def clear(self, sizes: PaddedSizes) -> None:
        """Padding only, so that a run over it touches no sequence's memory."""
        self.send(Step(0, []), [], sizes)

    def _send(self, sizes: PaddedSizes) -> None:
        num_words = self._first_table + sizes.num_rows * sizes.num_pages
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
        words = self.device[self._first_table : self._first_table + sizes.num_rows * sizes.num_pages]
        return words.view(sizes.num_rows, sizes.num_pages)

    def truncation(self, num_fronts: int, *, is_ranked: bool) -> Truncation:
        return Truncation(
            self.real(TEMPERATURE, num_fronts),
            self.real(LOG_MIN_P, num_fronts),
            self.whole(TOP_K, num_fronts),
            self.real(TOP_P, num_fronts),
            is_ranked=is_ranked,
            num_candidates=self._num_candidates,
        )

    def _pack_rows(self, step: Step, sizes: PaddedSizes) -> None:
        first, num_words = self._first_table, sizes.num_rows * sizes.num_pages
        tables = self._whole[first : first + num_words].reshape(sizes.num_rows, sizes.num_pages)
        tables[step.num_rows :] = self._cache.null_page
        position_R = slot_R = np.zeros(0, np.int64)
        if step.runs:
            table_RW = self._tables.of([run.sequence for run in step.runs], sizes.num_pages)
            if step.num_rows > len(step.runs):
                table_RW = np.repeat(table_RW, [len(run.rows) for run in step.runs], axis=0)
            tables[: step.num_rows] = table_RW
            position_R, page_size = positions(step.runs), self._cache.page_size
            pages_R = table_RW[np.arange(len(position_R)), position_R // page_size]
            slot_R = pages_R * page_size + position_R % page_size
        self._pack(POSITION, position_R, sizes.num_rows, padding=0)
        self._pack(SLOT, slot_R, sizes.num_rows, padding=self._cache.padding_slot)

    def _pack_fronts(self, block: int, fronts: Items[Sequence], count: int) -> None:
        own_slots = [slots(s, range(s.num_tokens - 1, s.num_tokens), self._cache.page_size)[0] for s in fronts]
        drawn = [front_uniform(sequence, block, TOKEN_DRAW) for sequence in fronts]
        self._pack(FRONT_SLOT, own_slots, count, padding=self._cache.padding_slot)
        self._pack(UNIFORM + block, drawn, count, padding=0.0)
        self._pack_draws(fronts, count)

    def _pack_draws(self, sequences: Items[Sequence], count: int) -> None:
        draws = [sequence.draw for sequence in sequences]
        self._pack(TEMPERATURE, [draw.temperature for draw in draws], count, padding=1.0)
        self._pack(LOG_MIN_P, [draw.log_min_p for draw in draws], count, padding=-np.inf)
        if not draws or True in [draw.is_ranked for draw in draws]:
            self._pack(TOP_K, [draw.top_k for draw in draws], count, padding=0)
            self._pack(TOP_P, [draw.top_p for draw in draws], count, padding=1.0)

    def _pack(self, field: int, values: Items[float] | np.ndarray, count: int, *, padding: float) -> None:
        words = self._real if field >= TEMPERATURE else self._whole
        first = field * MAX_ROWS
        words[first : first + len(values)] = values
        words[first + len(values) : first + count] = padding
