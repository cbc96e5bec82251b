"""Inputs of a Step's rows and front rows, which the host packs into one buffer of 8-byte words.

Shapes: R rows or fronts with padding, F fronts, X words of a row, W pages of a table, C changed logits, M words of a
mask, N blocks.
"""

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvium_core.engine.device.paged_cache import Integers, PagedCache, positions
from nvium_core.engine.sampling_params import DRAW, HEAD_RULES, Draw, ExitRule
from nvium_core.engine.schedule.sequence import NEUTRAL, NUM_FIELDS, Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig

Records = NDArray[np.void]
"""Rows of `row_type`."""

MAX_FRONTS = 256  # maximum front rows per call, which bounds memory
NUM_ENTRY_WORDS = 1 + NUM_FIELDS  # words of a changed logit: its front, and the fields of `LogitChanges`


class Front(NamedTuple):
    """A row whose next token is to be decided, and the first block after which it may emit.

    `log_reached`: log Π (1 − w_j) over the exits that it has passed.
    """

    sequence: Sequence
    row: int
    first: int
    log_reached: float


class Variant(NamedTuple):
    """Sizes of the inputs, and which computations are needed.

    A CUDA graph serves all inputs up to its sizes. `num_changes` is its capacity; `InputViews.used` of it are in use.
    """

    num_rows: int
    num_pages: int = 0
    num_changes: int = 0
    has_masks: bool = False
    is_ranked: bool = False
    mixes: bool = False
    has_original: bool = False


class InputViews(NamedTuple):
    """Views of a buffer. `rows`: a column [R] for each field of `row_type`.

    Of the `used` changed logits, `entries` has the front and the token, and `values` the rest, in float64.
    """

    rows: dict[str, Any]
    table_RW: Any
    masks_RM: Any
    used: Any
    entries_C5: Any
    values_C5: Any


def row_type(num_exits: int) -> np.dtype[np.void]:
    """Return the layout of a row, in words of 8 bytes.

    `source`: row of the previous pass that emitted this row's token, or -1. `first`: first block after which a front
    row may emit. `log_reached`: log Π (1 − w_j) over the exits that a front row passed before. `uniform`: numbers for
    drawing a token at each exit, then for routing at each exit.
    """
    integers = [(name, "<i8") for name in ("token", "source", "position", "slot", "front_slot", "first")]
    return np.dtype([*integers, ("log_reached", "<f8"), *DRAW.descr, ("uniform", "<f8", (2, num_exits))])


class Inputs:
    def __init__(self, cache: PagedCache, config: NviumConfig) -> None:
        self._cache = cache
        self._mask_words = -(-config.vocab_size // 64)
        self._row_type = row_type(config.num_exits)
        padding, slot = Draw(), cache.padding_slot
        self._padding = np.array((0, -1, 0, slot, slot, 0, 0.0, *padding, 0.0), self._row_type)

    def variant(self, fronts: Items[Front], *, is_last: bool) -> Variant:
        """Return the variant for these front rows, without padding. `is_last`: the call includes the last exit."""
        draws = {front.sequence.draw for front in fronts}
        rules = {draw.rule for draw in draws}
        return Variant(
            num_rows=len(fronts),
            num_changes=sum(len(front.sequence.changes or ()) for front in fronts),
            has_masks=any(front.sequence.constraint is not None for front in fronts),
            is_ranked=any(draw.is_ranked for draw in draws),
            mixes=bool(rules & HEAD_RULES) or (is_last and ExitRule.MIXTURE in rules),
            has_original=ExitRule.ORIGINAL in rules,
        )

    def num_words(self, variant: Variant) -> int:
        return sum(height * width for height, width in self._shapes(variant))

    def views(self, buffer: Tensor, variant: Variant) -> InputViews:
        words = buffer[: self.num_words(variant)]
        row_RX, table, masks, used, entries = self._parts(words, variant)
        number_RX, rows = row_RX.view(torch.float64), dict[str, Tensor]()
        for name, (kind, place, *_) in (self._row_type.fields or {}).items():
            words_RX = number_RX if kind.base == np.float64 else row_RX
            own_RX = words_RX[:, place // 8 :][:, : kind.itemsize // 8]
            rows[name] = own_RX.unflatten(1, kind.shape) if kind.shape else own_RX[:, 0]
        return InputViews(rows, table, masks, used, entries, entries.view(torch.float64))

    def write(
        self, buffer: Tensor, variant: Variant, rows: Items[Rows], fronts: Items[Front], previous: Items[Front] = ()
    ) -> Tensor:
        """Write the inputs into the buffer and return its used part. The rest holds changes of earlier calls.

        `previous`: front rows of the previous pass, whose tokens only the device knows.
        """
        words = buffer[: self.num_words(variant)]
        words_RX, table_RW, masks_RM, used, entries_C5 = (part.numpy() for part in self._parts(words, variant))
        row_R = words_RX.view(self._row_type)[:, 0]
        row_R[:] = self._padding
        table_RW[:] = self._cache.null_page
        if rows:
            self._write_rows(row_R, table_RW, rows, previous)
        if fronts:
            self._write_fronts(row_R[: len(fronts)], fronts)
        if variant.has_masks:
            masks_RM[len(fronts) :] = -1
            masks_RM[: len(fronts)] = pack_masks([front.sequence for front in fronts], 8 * self._mask_words)
        num_used = write_changes(entries_C5, fronts) if variant.num_changes else 0
        used[:] = num_used
        return words[: len(words) - NUM_ENTRY_WORDS * (variant.num_changes - num_used)]

    def _shapes(self, variant: Variant) -> list[tuple[int, int]]:
        rows, mask_words = variant.num_rows, self._mask_words if variant.has_masks else 0
        row_words = self._row_type.itemsize // 8
        entries = (variant.num_changes, NUM_ENTRY_WORDS)
        return [(rows, row_words), (rows, variant.num_pages), (rows, mask_words), (1, 1), entries]

    def _parts(self, words: Tensor, variant: Variant) -> list[Tensor]:
        shapes = self._shapes(variant)
        parts = words.split([height * width for height, width in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _write_rows(self, row_R: Records, table_RW: Integers, rows: Items[Rows], previous: Items[Front]) -> None:
        own_RW = self._cache.tables(rows).repeat([len(own.rows) for own in rows], 0)
        (count, width), position_R = own_RW.shape, positions(rows)
        page_R = own_RW[np.arange(count), position_R // self._cache.page_size]
        table_RW[:count, :width] = own_RW
        row_R["position"][:count] = position_R
        row_R["slot"][:count] = self._cache.slots_in(page_R, position_R)
        row_R["token"][:count], row_R["source"][:count] = tokens_and_sources(rows, previous)

    def _write_fronts(self, row_F: Records, fronts: Items[Front]) -> None:
        uniforms = b"".join([front.sequence.uniforms.at(front.row) for front in fronts])
        row_F["uniform"] = np.frombuffer(uniforms).reshape(len(fronts), 2, -1)
        page_F = np.array([front.sequence.pages[front.row // self._cache.page_size] for front in fronts])
        row_F["front_slot"] = self._cache.slots_in(page_F, np.array([front.row for front in fronts]))
        row_F["first"] = [front.first for front in fronts]
        row_F["log_reached"] = [front.log_reached for front in fronts]
        row_F[[*Draw._fields]] = np.frombuffer(b"".join([front.sequence.draw_bytes for front in fronts]), DRAW)
        is_original_F, token_FN = row_F["rule"] == ExitRule.ORIGINAL, row_F["uniform"][:, 0]
        token_FN[is_original_F, -1] = token_FN[is_original_F, 0]


def tokens_and_sources(rows: Items[Rows], previous: Items[Front]) -> tuple[list[int], list[int]]:
    """Return each row's token and `source`. Only a last row may have an unknown token, which is 0."""
    source_of = {front.sequence: source for source, front in enumerate(previous)}
    tokens, sources = list[int](), list[int]()
    for sequence, own in rows:
        tokens += sequence.token_ids[own.start : own.stop]
        sources += [-1] * (len(tokens) - len(sources))
        if own.stop > sequence.num_tokens:
            tokens.append(0)
            sources.append(source_of[sequence])
    return tokens, sources


def write_changes(entries_C5: Integers, fronts: Items[Front]) -> int:
    """Write the changed logits and return their number: at least one, which then changes nothing."""
    tables = [np.array(front.sequence.changes.entries if front.sequence.changes else ()) for front in fronts]
    tables = tables if any(map(len, tables)) else [np.array(NEUTRAL)]
    fields_C4 = np.concatenate([[], *tables]).reshape(-1, NUM_FIELDS)
    count = len(fields_C4)
    entries_C5[:count, 0] = np.repeat(np.arange(len(tables)), [len(table) // NUM_FIELDS for table in tables])
    entries_C5[:count, 1] = fields_C4[:, 0]
    entries_C5.view(np.float64)[:count, 2:] = fields_C4[:, 1:]
    return count


def pack_masks(sequences: Items[Sequence], num_bytes: int) -> NDArray[np.int64]:
    """Pack the constraints' masks, 64 tokens per word, [F, words]. Without a constraint, every token is allowed."""
    full = b"\xff" * num_bytes
    masks = [full if each.constraint is None else each.constraint.allowed[:num_bytes] for each in sequences]
    packed = b"".join(mask.ljust(num_bytes, b"\0") for mask in masks)
    return np.frombuffer(packed, np.int64).reshape(len(masks), num_bytes // 8)
