"""What a Step or a pass needs on the device, packed by the host into one buffer and sent in one copy.

The buffer has 8-byte words, whole numbers and float64 side by side: fields of `MAX_ROWS` words each, the turns of a
pass and of the one before, then the rows' page tables. Every view of it stays where it is, so a CUDA graph can read it.
Rows and fronts are padded to a power of two; padding writes to the padding slot and sees the null slot.

Shapes: R rows, F fronts, W pages of the longest table, each with its padding; N blocks.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.graphs.members import Members
from nvium_core.engine.device.graphs.seat_tables import SeatTables
from nvium_core.engine.device.layers.backend import tokens_of
from nvium_core.engine.device.native import native_library
from nvium_core.engine.device.native.uniforms import Uniforms
from nvium_core.engine.device.paged_cache import Integers, PagedCache, positions
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


def widths(max_pages: int, *, has_few: bool) -> list[int]:
    """Of tables, up to that of the longest sequence."""
    width, ratio = (MIN_WIDTH, WIDTH_RATIO) if has_few else (1, 2)
    found = list[int]()
    while width < max_pages:
        found.append(width)
        width *= ratio
    return [*found, max_pages]


class Inputs:
    def __init__(
        self,
        cache: PagedCache,
        *,
        num_blocks: int,
        max_pages: int,
        reads_in_place: bool,
        max_table: int | None = None,
        num_candidates: int = MANY_CANDIDATES,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        """`max_pages`: of any sequence. `reads_in_place`: attention does not copy keys, so tables may be longer than
        needed. `max_table`: entries that a Step's table may have; all there is room for without it. `num_candidates`:
        among which tokens are ranked."""
        self._cache = cache
        self._num_candidates = num_candidates
        self._num_blocks = num_blocks
        self._max_table = MAX_ROWS * max_pages if max_table is None else max_table
        self.widths = widths(max_pages, has_few=reads_in_place)
        """Of all tables there may be."""
        self._first_turn = MAX_ROWS * num_fields(num_blocks)
        self._first_table = self._first_turn + 2
        device = cache.keys.device
        is_cuda = device.type == "cuda"
        num_words = self._first_table + MAX_ROWS * max_pages
        self.host = torch.zeros(num_words, dtype=torch.long, pin_memory=is_cuda)
        self.device = torch.zeros(num_words, dtype=torch.long, device=device)
        self._whole, self._real = self.host.numpy(), self.host.view(torch.float64).numpy()
        fields = self._real[: self._first_turn].reshape(-1, MAX_ROWS)
        self._tables = SeatTables(max_pages, cache.null_page)
        self._uniforms = Uniforms(native_library(), self._field(POSITION), fields[UNIFORM:])
        self.make_fence = make_fence
        self._sent = make_fence(device)
        self._packed: tuple[Members, int, PaddedSizes] | None = None
        """Who was packed last, and at which age, if it was for a pass."""
        self._places_2R = self._places(0)
        self._source_R: Integers | None = None
        """What was packed last."""
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def sizes(self, num_rows: int, num_positions: int, num_fronts: int) -> PaddedSizes:
        """What so many rows of sequences that are at most so long fit into."""
        return PaddedSizes(power_of_two(num_rows), self.width(num_positions), power_of_two(num_fronts))

    def width(self, num_positions: int) -> int:
        """Pages of tables that hold so many positions, with padding."""
        num_pages = -(-num_positions // self._cache.page_size)
        return self.widths[bisect_left(self.widths, num_pages)]

    def fits(self, num_rows: int, num_positions: int) -> bool:
        """Whether there is room for so many rows of sequences that are at most so long."""
        return num_rows <= MAX_ROWS and power_of_two(num_rows) * self.width(num_positions) <= self._max_table

    def grown(self, sizes: PaddedSizes, num_rows: int, num_positions: int) -> PaddedSizes | None:
        """Those of a pass that follows one of these sizes, mostly the same; None if it does not fit."""
        if sizes.num_rows // 2 < num_rows <= sizes.num_rows and sizes.num_pages == self.width(num_positions):
            return sizes
        return self.sizes(num_rows, num_positions, num_rows) if self.fits(num_rows, num_positions) else None

    def send(self, step: Step, fronts: Items[Sequence], sizes: PaddedSizes) -> None:
        """Pack the Step, and what is drawn for those of its fronts that `fronts` names; send it."""
        self._sent.wait()  # the last Step's numbers have left the host
        self._packed = None
        self._pack(TOKEN, tokens_of(step.runs), sizes.num_rows, padding=0)
        self._pack_rows(step, sizes)
        self._pack_fronts(step.block, fronts, sizes.num_fronts)
        self._send(sizes)

    def send_pass(self, members: Members, age: int, source_R: Integers | None, sizes: PaddedSizes, turn: int) -> None:
        """A row of each member for all blocks. With `source_R` its token is what the pass before, whose turn was the
        other one of 0 and 1, drew in that row."""
        self._sent.wait()
        if self._packed == (members, age - 1, sizes):
            self._advance(members, age, sizes)
        else:
            self._pack_members(members, age, sizes)
        self._packed = members, age, sizes
        count = len(members.sequences)
        if source_R is None:
            self._pack(TOKEN, members.tokens(age), sizes.num_rows, padding=0)
        if source_R is None or source_R is not self._source_R:
            self._field(SOURCE)[:count] = -1 if source_R is None else source_R
            self._source_R = source_R
        self._whole[self._first_turn], self._whole[self._first_turn + 1] = turn, 1 - turn
        self._uniforms.write(count)
        self._send(sizes)

    def clear(self, sizes: PaddedSizes) -> None:
        """Padding only, so that a run over it touches no sequence's memory."""
        self.send(Step(0, []), [], sizes)

    def _send(self, sizes: PaddedSizes) -> None:
        num_words = self._first_table + sizes.num_rows * sizes.num_pages
        if num_words not in self._views:
            self._views[num_words] = self.device[:num_words], self.host[:num_words]
        there, here = self._views[num_words]
        there.copy_(here, non_blocking=True)
        self._sent.set()

    def whole(self, field: int, count: int) -> Tensor:
        """A field of whole numbers on the device, [count]."""
        return self.device[field * MAX_ROWS : field * MAX_ROWS + count]

    @property
    def turn(self) -> Tensor:
        """Of the pass, [1]."""
        return self.device[self._first_turn : self._first_turn + 1]

    @property
    def other_turn(self) -> Tensor:
        """Of the pass before, [1]."""
        return self.device[self._first_turn + 1 : self._first_turn + 2]

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

    def _field(self, field: int) -> Integers:
        """Of whole numbers, on the host, with room for all rows."""
        return self._whole[field * MAX_ROWS : (field + 1) * MAX_ROWS]

    def _places(self, count: int) -> Integers:
        """Positions and slots of so many rows, [2, R]."""
        return self._whole[POSITION * MAX_ROWS : (SLOT + 1) * MAX_ROWS].reshape(2, MAX_ROWS)[:, :count]

    def _host_tables(self, sizes: PaddedSizes) -> Integers:
        """`tables`, on the host."""
        words = self._whole[self._first_table : self._first_table + sizes.num_rows * sizes.num_pages]
        return words.reshape(sizes.num_rows, sizes.num_pages)

    def _pack_rows(self, step: Step, sizes: PaddedSizes) -> None:
        table_RW = self._host_tables(sizes)
        table_RW[step.num_rows :] = self._cache.null_page
        position_R = np.zeros(0, np.int64)
        if step.runs:
            own_BW = self._tables.of([run.sequence for run in step.runs], sizes.num_pages)
            is_one_each = step.num_rows == len(step.runs)
            table_RW[: step.num_rows] = own_BW if is_one_each else own_BW.repeat([len(r.rows) for r in step.runs], 0)
            position_R = positions(step.runs)
        self._pack_positions(table_RW[: step.num_rows], position_R, sizes)

    def _pack_positions(self, table_RW: Integers, position_R: Integers, sizes: PaddedSizes) -> None:
        """And slots."""
        page_size = self._cache.page_size
        page_R = position_R // page_size
        slot_R = (table_RW[np.arange(len(page_R)), page_R] - page_R) * page_size + position_R
        self._pack(POSITION, position_R, sizes.num_rows, padding=0)
        self._pack(SLOT, slot_R, sizes.num_rows, padding=self._cache.padding_slot)

    def _pack_members(self, members: Members, age: int, sizes: PaddedSizes) -> None:
        """All but tokens, sources and uniforms."""
        count, table_RW = len(members.sequences), self._host_tables(sizes)
        table_RW[:count] = self._tables.of(members.sequences, sizes.num_pages)
        table_RW[count:] = self._cache.null_page
        self._pack_positions(table_RW[:count], members.start_R + age, sizes)
        self._pack_draws(members.sequences, sizes.num_rows)
        self._field(SOURCE)[count : sizes.num_rows] = -1
        self._source_R = None
        self._uniforms.key_R2[:count] = [(sequence.seed, sequence.choice) for sequence in members.sequences]
        self._places_2R = self._places(count)

    def _advance(self, members: Members, age: int, sizes: PaddedSizes) -> None:
        """What has changed since the pass before: positions, with their slots, and pages where new ones begin."""
        self._places_2R += 1
        for row, number in members.new_pages(age):
            page = members.pages[row][number]
            self._host_tables(sizes)[row, number] = page
            self._field(SLOT)[row] = page * self._cache.page_size

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
