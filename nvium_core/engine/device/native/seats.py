"""What native calls know of running sequences, seat by seat: renewed when that changes, not with every Step."""

import ctypes
from array import array

from nvium_core.engine.device.native.weights import address
from nvium_core.engine.params import MAX_DRAFTS
from nvium_core.engine.schedule.logit_changes import NUM_FIELDS
from nvium_core.engine.schedule.sequence import Sequence

MAX_EMISSIONS = max(32, MAX_DRAFTS + 1)
"""Of one run in a call."""


class NativeSeat(ctypes.Structure):
    """`Seat` of seat.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "tokens")),
        *((name, ctypes.c_int64) for name in ("seed", "choice", "kind")),
        *((name, ctypes.c_double) for name in ("temperature", "log_min_p", "top_k", "top_p")),
        ("num_changes", ctypes.c_int64),
        ("changes", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("presence", "frequency", "repetition")),
        ("num_prompt_tokens", ctypes.c_int64),
        ("mask_bytes", ctypes.c_int64),
        ("mask", ctypes.c_char_p),
        ("num_stops", ctypes.c_int64),
        ("stops", ctypes.c_void_p),
        ("is_original", ctypes.c_int64),
    )


class Known:
    """What a seat's sequence was when it was last written, and what native calls read of it."""

    def __init__(self, sequence: Sequence, seat: NativeSeat, context: int) -> None:
        self.sequence = sequence
        self.page_list: list[int] | None = None
        self.num_pages = 0
        self.pages = array("q")
        self.tokens = array("q", bytes(8 * context))
        self.tokens[: sequence.num_tokens] = array("q", sequence.token_ids)
        self.stops = array("q", sequence.stop_token_ids)
        self.changes = array("d")
        params = sequence.params
        seat.presence, seat.frequency = params.presence_penalty, params.frequency_penalty
        seat.repetition, seat.num_prompt_tokens = params.repetition_penalty, sequence.num_prompt_tokens
        seat.seed, seat.choice, seat.is_original = sequence.seed, sequence.choice, sequence.is_original
        seat.kind, seat.temperature, seat.log_min_p, seat.top_k, seat.top_p, _ = sequence.draw
        seat.tokens, seat.num_stops, seat.stops = address(self.tokens), len(self.stops), address(self.stops)
        seat.num_changes, seat.changes, seat.mask_bytes, seat.mask = 0, None, 0, None


class Seats:
    def __init__(self, count: int, context: int) -> None:
        self.array = (NativeSeat * count)()
        self._known: list[Known | None] = [None] * count
        self._context = context
        self._spare = array("d", bytes(8 * NUM_FIELDS * MAX_EMISSIONS))

    def of(self, sequence: Sequence) -> int:
        """The sequence's seat, which is up to date."""
        number = sequence.seat
        assert number is not None
        seat, known = self.array[number], self._known[number]
        if known is None or known.sequence is not sequence:
            self._known[number] = known = Known(sequence, seat, self._context + 1)
        pages = sequence.pages
        if known.page_list is not pages or known.num_pages != len(pages):  # an admission gives it another list
            known.page_list, known.num_pages, known.pages = pages, len(pages), array("q", pages)
            seat.pages = address(known.pages)
        start = min(sequence.filled[-1], sequence.num_verified - 1)  # other backends may have emitted what comes next
        known.tokens[start : sequence.num_tokens] = array("q", sequence.token_ids[start:])
        if sequence.changes is not None:
            known.changes = sequence.changes.entries + self._spare
            seat.num_changes, seat.changes = len(sequence.changes), address(known.changes)
        if sequence.constraint is not None:
            seat.mask = mask = sequence.constraint.allowed
            seat.mask_bytes = len(mask)
        return number
