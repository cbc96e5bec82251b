"""What a Step needs on the device, packed by the host into one buffer and sent in one copy.

The buffer has 8-byte words, whole numbers and float64 side by side: fields of `MOST_ROWS` words each, then the rows'
page tables. Every view of it stays where it is, so a CUDA graph can read it. Rows and fronts are filled up to a power
of two with ones that are nobody's: they write to the padding slot and see the null slot.

Shapes: R rows, F fronts, W pages of the longest table, each with its padding.
"""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.device.sampling import Truncation
from nvium_core.engine.schedule.front import front_uniform
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.randomness import TOKEN as TOKEN_DRAW
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.engine.schedule.sequence import Sequence

MOST_ROWS = 64
"""Rows and fronts there is room for."""

TOKEN, POSITION, SLOT, FRONT_SLOT, TOP_K, UNIFORM, TEMPERATURE, LOG_MIN_P, TOP_P = range(9)
"""Fields in their order; from UNIFORM on they are float64."""

NUM_FIELDS = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Step's views, padding included."""

    num_rows: int
    num_pages: int
    num_fronts: int


class Inputs:
    def __init__(self, attention: PagedAttention, *, most_pages: int, device: torch.device) -> None:
        """`most_pages`: of any sequence."""
        self._attention = attention
        self._most_pages = most_pages
        is_cuda = device.type == "cuda"
        num_words = MOST_ROWS * (NUM_FIELDS + most_pages)
        host = torch.zeros(num_words, dtype=torch.long, pin_memory=is_cuda)
        self._host = host
        self._device = torch.zeros(num_words, dtype=torch.long, device=device)
        self._whole, self._real = host.numpy(), host.view(torch.float64).numpy()
        self._sent = torch.cuda.Event() if is_cuda else None

    def shape(self, step: Step, *, has_one_width: bool) -> Shape:
        """What the Step fits into, with all its runs' fronts; `has_one_width` makes all tables equally long."""
        longest = max(run.rows.stop for run in step.runs)
        num_pages = power_of_two(-(-longest // self._attention.page_size))
        return Shape(
            power_of_two(step.num_rows),
            self._most_pages if has_one_width else min(num_pages, self._most_pages),
            power_of_two(len(step.runs)),
        )

    def send(self, step: Step, fronts: Items[Sequence], shape: Shape) -> None:
        """Pack the Step, and what is drawn for those of its fronts that `fronts` names; send it."""
        if self._sent is not None:
            self._sent.synchronize()  # the last Step's numbers have left the host
        self._pack_rows(step, shape)
        self._pack_fronts(step, fronts, shape.num_fronts)
        num_words = MOST_ROWS * NUM_FIELDS + shape.num_rows * shape.num_pages
        self._device[:num_words].copy_(self._host[:num_words], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def whole(self, field: int, count: int) -> Tensor:
        """A field of whole numbers on the device, [count]."""
        return self._device[field * MOST_ROWS : field * MOST_ROWS + count]

    def real(self, field: int, count: int) -> Tensor:
        """A field of float64, [count]."""
        return self.whole(field, count).view(torch.float64)

    def tables(self, shape: Shape) -> Tensor:
        """The rows' pages, [R, W]; past a sequence's end the page of the null slot."""
        first = MOST_ROWS * NUM_FIELDS
        words = self._device[first : first + shape.num_rows * shape.num_pages]
        return words.view(shape.num_rows, shape.num_pages)

    def truncation(self, num_fronts: int, *, ranks: bool) -> Truncation:
        return Truncation(
            self.real(TEMPERATURE, num_fronts),
            self.real(LOG_MIN_P, num_fronts),
            self.whole(TOP_K, num_fronts),
            self.real(TOP_P, num_fronts),
            ranks=ranks,
        )

    def _pack_rows(self, step: Step, shape: Shape) -> None:
        page_size, null_page = self._attention.page_size, self._attention.null_slot // self._attention.page_size
        positions = [t for run in step.runs for t in run.rows]
        tokens = [token for run in step.runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
        own_slots = [slot for run in step.runs for slot in slots(run.sequence, run.rows, page_size)]
        self._pack(TOKEN, tokens, shape.num_rows, padding=0)
        self._pack(POSITION, positions, shape.num_rows, padding=0)
        self._pack(SLOT, own_slots, shape.num_rows, padding=self._attention.padding_slot)
        first = MOST_ROWS * NUM_FIELDS
        tables = self._whole[first : first + shape.num_rows * shape.num_pages]
        tables = tables.reshape(shape.num_rows, shape.num_pages)
        tables[:] = null_page
        first_row = 0
        for run in step.runs:
            pages = run.sequence.pages[: -(-run.rows.stop // page_size)]
            tables[first_row : first_row + len(run.rows), : len(pages)] = pages
            first_row += len(run.rows)

    def _pack_fronts(self, step: Step, fronts: Items[Sequence], count: int) -> None:
        asked = [sequence.params for sequence in fronts]
        page_size, padding_slot = self._attention.page_size, self._attention.padding_slot
        own_slots = [slots(s, range(s.num_tokens - 1, s.num_tokens), page_size)[0] for s in fronts]
        uniforms = [front_uniform(sequence, step.block, TOKEN_DRAW) for sequence in fronts]
        log_min_ps = [math.log(p.min_p) if p.min_p else -math.inf for p in asked]
        self._pack(FRONT_SLOT, own_slots, count, padding=padding_slot)
        self._pack(TOP_K, [p.top_k for p in asked], count, padding=0)
        self._pack(UNIFORM, uniforms, count, padding=0.0)
        self._pack(TEMPERATURE, [p.temperature for p in asked], count, padding=1.0)
        self._pack(LOG_MIN_P, log_min_ps, count, padding=-math.inf)
        self._pack(TOP_P, [p.top_p for p in asked], count, padding=1.0)

    def _pack(self, field: int, values: Items[float], count: int, *, padding: float) -> None:
        words = self._real if field >= UNIFORM else self._whole
        first = field * MOST_ROWS
        words[first : first + len(values)] = values
        words[first + len(values) : first + count] = padding


def power_of_two(number: int) -> int:
    """The least that is not less."""
    return 1 << (number - 1).bit_length()
