"""Inputs of a Step's rows and front rows, which the host packs into one buffer of 8-byte words.

Shapes: R rows or fronts with padding, F fronts, W pages of a table, C changed logits, M words of a mask, N blocks.
"""

from collections.abc import Sequence as Items
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvium_core.engine.device.native.uniforms import write_uniforms
from nvium_core.engine.device.paged_cache import PagedCache, positions, tokens_of
from nvium_core.engine.params import Draw, Kind
from nvium_core.engine.schedule.logit_changes import NUM_FIELDS
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig

MAX_FRONTS = 256  # maximum front rows per call, which bounds memory


class Front(NamedTuple):
    """A row whose next token is to be decided, its cache slot, and the first block after which it may emit."""

    sequence: Sequence
    row: int
    slot: int
    first: int


class Field(IntEnum):
    """Inputs of a row. Fields before TEMPERATURE are int64, all others float64.

    SOURCE: row of the previous pass that emitted this row's token, or -1. FIRST: first block after which a front row
    may emit. UNIFORM: 2N numbers, for the token at each exit, then for routing at each exit.
    """

    TOKEN, SOURCE, POSITION, SLOT, FRONT_SLOT, KIND, FIRST, TOP_K, TEMPERATURE, LOG_MIN_P, TOP_P, UNIFORM = range(12)


class Variant(NamedTuple):
    """Sizes of the inputs, and which computations are needed. Each variant has its own CUDA graph."""

    num_rows: int
    num_pages: int = 0
    num_changes: int = 0
    has_masks: bool = False
    is_ranked: bool = False
    mixes: bool = False
    has_original: bool = False


class Layout(NamedTuple):
    """Views of a buffer. `real` shows the words of `whole` as float64, and `values` those of `entries`."""

    whole_XR: Any
    real_XR: Any
    table_RW: Any
    entries_5C: Any
    values_5C: Any
    masks_RM: Any
    words: Tensor


class Inputs:
    def __init__(self, cache: PagedCache, config: NviumConfig) -> None:
        self._cache = cache
        self._num_blocks = config.num_exits
        self._num_fields = Field.UNIFORM + 2 * config.num_exits
        self._mask_words = -(-config.vocab_size // 64)
        self._position_R = np.zeros(MAX_FRONTS, np.int64)
        self._uniform_XR = np.zeros((2 * config.num_exits, MAX_FRONTS))
        self._key_R2 = np.zeros((MAX_FRONTS, 2), np.int64)
        self._padding_X1 = np.zeros((self._num_fields, 1), np.int64)
        self._padding_X1[[Field.SLOT, Field.FRONT_SLOT]] = cache.padding_slot
        self._padding_X1[Field.SOURCE] = -1
        self._padding_X1.view(np.float64)[[Field.TEMPERATURE, Field.LOG_MIN_P, Field.TOP_P], 0] = 1.0, -np.inf, 1.0

    def variant(self, fronts: Items[Front], *, is_last: bool) -> Variant:
        """Return the variant for these front rows, without padding. `is_last`: the call includes the last exit."""
        draws = [self._draw(front.sequence) for front in fronts]
        kinds = {draw.kind for draw in draws}
        return Variant(
            num_rows=len(fronts),
            num_changes=sum(len(front.sequence.changes or ()) for front in fronts),
            has_masks=any(front.sequence.constraint is not None for front in fronts),
            is_ranked=any(draw.is_ranked for draw in draws),
            mixes=Kind.ARGMAX in kinds or (is_last and Kind.MIXTURE in kinds),
            has_original=Kind.ORIGINAL in kinds,
        )

    def num_words(self, variant: Variant) -> int:
        return sum(height * width for height, width in self._shapes(variant))

    def layout(self, buffer: Tensor, variant: Variant) -> Layout:
        shapes = self._shapes(variant)
        lengths = [height * width for height, width in shapes]
        words = buffer[: sum(lengths)]
        whole, table, entries, masks = (
            part.view(shape) for part, shape in zip(words.split(lengths), shapes, strict=True)
        )
        return Layout(whole, whole.view(torch.float64), table, entries, entries.view(torch.float64), masks, words)

    def write(
        self, buffer: Tensor, variant: Variant, rows: Items[Rows], fronts: Items[Front], *, is_ahead: bool = False
    ) -> Tensor:
        """Write the inputs into the buffer and return the used part of the buffer.

        With `is_ahead`, row r reads the token that row r of the previous pass has emitted.
        """
        here = self.layout(buffer, variant)
        host = Layout._make([*(view.numpy() for view in here[:-1]), here.words])
        host.whole_XR[:] = self._padding_X1
        host.table_RW[:] = self._cache.null_page
        if rows:
            self._write_rows(host, rows, is_ahead=is_ahead)
        if fronts:
            self._write_fronts(host, fronts)
        if variant.num_changes:
            self._write_changes(host, fronts)
        if variant.has_masks:
            host.masks_RM[len(fronts) :] = -1
            host.masks_RM[: len(fronts)] = packed_masks([front.sequence for front in fronts], 8 * self._mask_words)
        return here.words

    def _shapes(self, variant: Variant) -> list[tuple[int, int]]:
        rows, mask_words = variant.num_rows, self._mask_words if variant.has_masks else 0
        return [(self._num_fields, rows), (rows, variant.num_pages), (5, variant.num_changes), (rows, mask_words)]

    def _draw(self, sequence: Sequence) -> Draw:
        """Return how to sample. If the model has a single exit, the argmax needs no certificate."""
        draw = sequence.draw
        is_certain = draw.kind is Kind.ARGMAX and self._num_blocks == 1
        return draw._replace(kind=Kind.ORIGINAL, temperature=0.0) if is_certain else draw

    def _write_rows(self, host: Layout, rows: Items[Rows], *, is_ahead: bool) -> None:
        position_R, page_size = positions(rows), self._cache.page_size
        count = len(position_R)
        own_BW = self._cache.tables(rows)
        table_RW = own_BW.repeat([len(own.rows) for own in rows], 0)
        host.table_RW[:count, : own_BW.shape[1]] = table_RW
        page_R = table_RW[np.arange(count), position_R // page_size]
        host.whole_XR[Field.POSITION, :count] = position_R
        host.whole_XR[Field.SLOT, :count] = page_R * page_size + position_R % page_size
        field, values = (Field.SOURCE, np.arange(count)) if is_ahead else (Field.TOKEN, tokens_of(rows))
        host.whole_XR[field, :count] = values

    def _write_fronts(self, host: Layout, fronts: Items[Front]) -> None:
        count, draws = len(fronts), [self._draw(front.sequence) for front in fronts]
        kind_F = np.array([draw.kind for draw in draws])
        host.whole_XR[Field.FRONT_SLOT, :count] = [front.slot for front in fronts]
        host.whole_XR[Field.KIND, :count] = kind_F
        host.whole_XR[Field.FIRST, :count] = [front.first for front in fronts]
        host.whole_XR[Field.TOP_K, :count] = [draw.top_k for draw in draws]
        host.real_XR[Field.TEMPERATURE, :count] = [draw.temperature for draw in draws]
        host.real_XR[Field.LOG_MIN_P, :count] = [draw.log_min_p for draw in draws]
        host.real_XR[Field.TOP_P, :count] = [draw.top_p for draw in draws]
        self._position_R[:count] = [front.row for front in fronts]
        self._key_R2[:count] = [(front.sequence.seed, front.sequence.choice) for front in fronts]
        write_uniforms(self._key_R2, self._position_R, self._uniform_XR, count)
        uniform_XF = host.real_XR[Field.UNIFORM :, :count]
        uniform_XF[:] = self._uniform_XR[:, :count]
        uniform_XF[self._num_blocks - 1, kind_F == Kind.ORIGINAL] = uniform_XF[0, kind_F == Kind.ORIGINAL]

    def _write_changes(self, host: Layout, fronts: Items[Front]) -> None:
        """Write the changed logits. Padding repeats the first entry: writing the same value again is harmless."""
        tables = [np.array(front.sequence.changes.entries if front.sequence.changes else ()) for front in fronts]
        entries_C4 = np.concatenate(tables).reshape(-1, NUM_FIELDS)
        count = len(entries_C4)
        host.entries_5C[0, :count] = np.repeat(np.arange(len(tables)), [len(table) // NUM_FIELDS for table in tables])
        host.entries_5C[1, :count] = entries_C4[:, 0]
        host.values_5C[2:, :count] = entries_C4[:, 1:].T
        host.entries_5C[:, count:] = host.entries_5C[:, :1]


def packed_masks(sequences: Items[Sequence], num_bytes: int) -> NDArray[np.int64]:
    """Pack the constraints' masks, 64 tokens per word, [F, words]. Without a constraint, every token is allowed."""
    full = b"\xff" * num_bytes
    masks = [full if each.constraint is None else each.constraint.allowed[:num_bytes] for each in sequences]
    packed = b"".join(mask.ljust(num_bytes, b"\0") for mask in masks)
    return np.frombuffer(packed, np.int64).reshape(len(masks), -1)
